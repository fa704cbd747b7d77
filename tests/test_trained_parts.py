"""What a recipe trains, counted from the shape alone, against what peft trains on the model itself."""

import pytest

from tunebook.model.shapes import build_shape
from tunebook.plan.optimizers import find_optimizer_bytes
from tunebook.plan.trained_parts import find_trained_parts, list_modules, path_of, skipped_share
from tunebook.system.quiet import quiet_libraries

CONFIG = {"model_type": "qwen2", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
ROWS = [3, 5, 7]


def shape_of(**changes):
    shape = build_shape({**CONFIG, **changes}, "")
    assert shape is not None
    return shape


def build(**changes):
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    with torch.device("meta"):
        return Qwen2ForCausalLM(Qwen2Config(**{**CONFIG, **changes}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "embedding", "head"),
    [
        ({}, "none", "none"),
        ({"modules_to_save": ["lm_head"]}, "none", "all"),
        ({"modules_to_save": ["embed_tokens", "down_proj"]}, "all", "none"),
        ({"modules_to_save": ["mlp", "model.norm", "input_layernorm"]}, "none", "none"),
        ({"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["layers.1.mlp.gate_proj"]}, "none", "none"),
        ({"use_dora": True, "target_modules": ["q_proj", "down_proj"]}, "none", "none"),
        ({"trainable_token_indices": ROWS}, "rows", "none"),
        ({"trainable_token_indices": {"embed_tokens": ROWS, "lm_head": ROWS[:1]}}, "rows", "rows"),
    ],
)
def test_what_is_trained_is_what_peft_trains(lora, embedding, head):
    from peft import LoraConfig, get_peft_model

    assumed = []
    parts = find_trained_parts(shape_of(), lora, 4, 0, assumed)
    config = LoraConfig(**{"target_modules": "all-linear", **lora}, r=4, task_type="CAUSAL_LM")
    with quiet_libraries():
        model = get_peft_model(build(), config, low_cpu_mem_usage=True)
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    assert (parts.number, parts.embedding, parts.head) == (sum(trained), embedding, head)
    assert parts.largest == max(trained) or "trainable_token_indices" in lora
    assert assumed == []


def test_new_tokens_have_rows_in_both_layers_and_a_tied_head_has_the_embeddings():
    plain = find_trained_parts(shape_of(), {}, 4, 0, []).number
    for tied, layers in ((False, 2), (True, 1)):
        parts = find_trained_parts(shape_of(tie_word_embeddings=tied), {}, 4, 5, [])
        assert parts.number - plain == 5 * layers * 32 and (parts.embedding, parts.head) == ("rows", "rows")
    whole = find_trained_parts(shape_of(), {"modules_to_save": ["embed_tokens", "lm_head"]}, 4, 5, [])
    assert (whole.embedding, whole.head) == ("all", "all")


def test_what_the_shape_does_not_tell_is_said():
    assumed = []
    find_trained_parts(
        shape_of(), {"modules_to_save": ["lm_head", "classifier"], "exclude_modules": "x"}, 4, 0, assumed
    )
    assert assumed == [
        "the adapter is counted as one on all linear layers",
        "classifier of modules_to_save is not known here, and not counted",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "llama", "gemma2", "phi3", "mistral", "qwen3"])
def test_modules_stand_where_transformers_has_them(kind):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {name: value for name, value in CONFIG.items() if name != "model_type"} | {"head_dim": 8}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config, pad_token_id=0))
    shape = build_shape({"model_type": kind, **config}, "")
    assert shape is not None
    modules = dict(model.named_modules())
    for path, number in list_modules(shape):
        assert modules[path].weight.numel() == number, path


@pytest.mark.slow
@pytest.mark.parametrize(
    "patterns", [["down_proj"], ["lm_head", "model.layers.1"], [r"model\.layers\.\d+\.mlp"], ["x"]]
)
def test_what_stays_unquantised_is_what_transformers_leaves(patterns):
    from transformers.quantizers.quantizers_utils import should_convert_module

    shape = shape_of()
    sizes = {path_of(layer, name): ins * outs for layer in range(3) for name, ins, outs in shape.linears}
    left = sum(number for path, number in sizes.items() if not should_convert_module(path, patterns))
    assert skipped_share(shape, patterns) == pytest.approx(left / sum(sizes.values()))
    assert (left > 0) == (patterns != ["x"])


@pytest.mark.parametrize(
    ("name", "on_gpu", "expected"),
    [
        ("adamw_torch", True, (8, 4, 0)),
        ("adamw_torch", False, (8, 0, 8)),
        ("adamw_torch_fused", True, (8, 0, 0)),
        ("adamw_torch_8bit", True, (2 + 8 / 256, 0, 0)),
        ("adamw_torch_4bit", True, (1 + 8 / 128, 0, 0)),
        ("rmsprop", True, (4, 4, 0)),
        ("rmsprop_bnb_8bit", True, (1 + 4 / 256, 0, 0)),
        ("lion_32bit", True, (4, 0, 0)),
        ("paged_ademamix_8bit", True, (3 + 12 / 256, 0, 0)),
        ("adafactor", True, (0, 0, 8)),
    ],
)
def test_an_optimizer_is_known_by_its_whole_name(name, on_gpu, expected):
    assumed = []
    assert find_optimizer_bytes(name, on_gpu, assumed) == expected and assumed == []


def test_an_optimizer_that_is_not_known_is_said():
    assumed = []
    assert find_optimizer_bytes("lomo", True, assumed) == (8, 4, 0)
    assert assumed == ["the states of lomo are counted as AdamW's"]
