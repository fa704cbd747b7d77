"""Keys of the lora section that leave each other nothing to do are refused on a model without weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from tiny_training import LORA, NF4, build_recipe
from tunebook.model.base_checks import find_lora_problems
from tunebook.model.lora_reach import adapted_modules
from tunebook.model.shapes import find_shape
from tunebook.plan.model_findings import find_hub_problems
from tunebook.system.quiet import quiet_libraries

pytestmark = pytest.mark.slow
QV, STARTS = ["q_proj", "v_proj"], ("pissa", "pissa_niter_4", "olora")
HEAD, TOKENS = ["q_proj", "lm_head"], {"add_special_tokens": ["<|tool|>"]}
UP = "mlp.up_proj.weight"


def hollow(tied: bool = False):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=300, num_hidden_layers=2, tie_word_embeddings=tied, **sizes)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def problems(lora, tied=False, **recipe) -> list[str]:
    made = build_recipe("org/any", lora={**LORA, **lora}, **recipe)
    return [problem.render().removeprefix("recipes/tiny.yaml: ") for problem in find_lora_problems(made, hollow(tied))]


REFUSED = [
    ({"target_modules": QV, "exclude_modules": ["v_proj"]}, "lora.exclude_modules: v_proj is in target_modules"),
    ({"target_modules": QV, "exclude_modules": r".*\.v_proj"}, "lora.exclude_modules: v_proj is in target_modules"),
    ({"target_modules": QV, "modules_to_save": ["v_proj"]}, "lora.modules_to_save: v_proj is in target_modules"),
    (
        {"target_modules": ["q_proj", "embed_tokens"], "layers_to_transform": [0]},
        "lora.layers_to_transform: embed_tokens, a target, stands in none of these layers",
    ),
    (
        {"target_modules": ["q_proj", "model.layers.1.self_attn.v_proj"], "layers_to_transform": [0]},
        "lora.layers_to_transform: target_modules names modules of layer 1 by their full path",
    ),
    (
        {"target_modules": ["model.layers.1.self_attn.v_proj"], "layers_to_transform": [0, 1]},
        "lora.layers_to_transform: layer 0 has none of target_modules",
    ),
    (
        {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "h"},
        "lora.layers_pattern: h matches no list of layers of this model. Layers are numbered under layers",
    ),
    (
        {"target_modules": ["q_proj"], "rank_pattern": {"v_proj": 2}},
        "lora.rank_pattern: v_proj matches nothing that gets",
    ),
    ({"target_modules": ["q_proj"], "alpha_pattern": {"v_proj": 2}}, "lora.alpha_pattern: v_proj matches nothing that"),
    ({"rank_pattern": {".*": 2, "q_proj": 4}}, "lora.rank_pattern: q_proj has no effect: patterns before it take all"),
    ({"rank_pattern": {"lm_head": 2}}, "lora.rank_pattern: lm_head matches nothing that gets LoRA"),
    (
        {"target_parameters": [UP], "exclude_modules": ["up_proj"]},
        f"lora.exclude_modules: {UP} is in target_parameters",
    ),
    ({"target_parameters": [UP], "modules_to_save": ["mlp"]}, f"lora.modules_to_save: {UP} is in target_parameters"),
    (
        {"modules_to_save": ["norm"]},
        "lora.modules_to_save: norm takes input_layernorm, post_attention_layernorm as well",
    ),
    (
        {"modules_to_save": ["embed_tokens"], "trainable_token_indices": [4]},
        "lora.trainable_token_indices: rows of embed_tokens, which modules_to_save trains whole",
    ),
    (
        {"modules_to_save": ["lm_head"], "trainable_token_indices": {"lm_head": [4]}},
        "lora.trainable_token_indices: rows of lm_head, which modules_to_save trains whole",
    ),
    (
        {"trainable_token_indices": {"norm": [4]}},
        "norm is no embedding and no output head. Rows are those of embed_tokens",
    ),
    ({"trainable_token_indices": {"lm_head": [300]}}, "no row 300"),
    *(({"init_lora_weights": start, "r": 65}, f"lora.r: {start} takes the rank from") for start in (*STARTS, "mica")),
    ({"init_lora_weights": "pissa", "rank_pattern": {"k_proj": 33}}, "lora.rank_pattern: pissa takes the rank from"),
]


@pytest.mark.parametrize(("lora", "words"), REFUSED)
def test_a_key_without_its_effect_is_refused_under_its_name(lora, words):
    [problem] = problems(lora)
    assert words in problem


@pytest.mark.parametrize(
    "lora",
    [
        {"target_modules": QV, "exclude_modules": ["layers.0.self_attn.v_proj"]},
        {"exclude_modules": ["down_proj", "lm_head"]},
        {"modules_to_save": ["v_proj"]},
        {"modules_to_save": ["model.norm"]},
        {"modules_to_save": ["norm", "input_layernorm", "post_attention_layernorm"]},
        {"target_modules": QV, "layers_to_transform": 1, "layers_pattern": ["layers"]},
        {
            "target_modules": QV,
            "rank_pattern": {"q_proj": 2, ".*": 4},
            "alpha_pattern": {"layers.0.self_attn.q_proj": 2},
        },
        {"target_modules": QV, "target_parameters": [UP], "rank_pattern": {"up_proj.weight": 2}},
        {"modules_to_save": ["lm_head"], "trainable_token_indices": [4]},
        {"trainable_token_indices": {"embed_tokens": [299], "lm_head": [0]}},
        {"init_lora_weights": "pissa", "r": 32},
        {"init_lora_weights": "gaussian", "r": 500},
        {"target_modules": None},
    ],
)
def test_keys_that_go_together_are_taken(lora):
    assert problems(lora) == []


@pytest.mark.parametrize("start", STARTS)
def test_a_start_out_of_the_base_leaves_a_tied_head_alone(start):
    """Taken out of the head it is taken out of the embedding, and what is saved is not what was trained."""
    for targets in (HEAD, ".*(q_proj|lm_head)"):
        lora = {"init_lora_weights": start, "target_modules": targets}
        [problem] = problems(lora, tied=True)
        assert problem.startswith(
            f"lora.target_modules: lm_head shares its matrix with embed_tokens, from which {start}"
        )
        assert problems(lora) == [], "a head of its own"
        assert problems({**lora, "init_lora_weights": True}, tied=True) == [], "nothing is taken out of the base"
    for targets in (None, ["q_proj", "embed_tokens"]):  # begins at zero on an embedding
        assert problems({"init_lora_weights": start, "target_modules": targets}, tied=True) == []


@pytest.mark.parametrize("saved", ["embed_tokens", "lm_head", "model.embed_tokens", "model"])
@pytest.mark.parametrize("tokens", [{"model": TOKENS}, {}], ids=["new", "known"])
def test_rows_of_tokens_need_both_users_of_a_tied_matrix(saved, tokens):
    lora = {"modules_to_save": [saved], **({} if tokens else {"trainable_token_indices": [4]})}
    report = problems({**lora, "target_modules": ["q_proj"]}, tied=True, **tokens)[0]
    assert report.startswith(f"lora.modules_to_save: {saved} shares its matrix with another layer"), report
    assert ("Name both, [embed_tokens, lm_head]" if tokens else "Remove it, or trainable_token_indices") in report


def test_new_tokens_beside_layers_that_are_trained_whole():
    both = ["embed_tokens", "lm_head"]
    assert problems({"modules_to_save": both}, tied=True, model=TOKENS) == []
    for saved in (["embed_tokens"], ["lm_head"], both):
        assert problems({"modules_to_save": saved}, model=TOKENS) == []
    for target in both:
        [problem] = problems({"target_modules": ["q_proj", target]}, model=TOKENS)
        assert problem.startswith(f"lora.target_modules: {target} cannot have LoRA: the rows of new tokens")


@pytest.mark.parametrize(("bits", "quantization"), [(4, NF4), (8, {"load_in_8bit": True})])
@pytest.mark.parametrize("saved", ["mlp", "q_proj"])
def test_quantised_layers_are_not_trained_whole(bits, quantization, saved):
    lora = {"modules_to_save": [saved], "target_modules": ["v_proj"]}
    [problem] = problems(lora, quantization=quantization)
    assert problem.startswith(f"lora.modules_to_save: {saved} is held in {bits} bits, and cannot be trained whole")
    inside = [saved] if saved == "q_proj" else ["up_proj", "gate_proj", "down_proj"]
    skipped = {**quantization, "llm_int8_skip_modules": inside}
    assert problems(lora) == problems(lora, quantization=skipped) == []
    assert problems({"modules_to_save": ["lm_head", "model.norm"]}, quantization=quantization) == []


def test_a_model_of_the_hub_is_refused_by_what_is_known_of_its_config(monkeypatch):
    def found(name: str, **lora) -> list[str]:
        recipe = build_recipe(name, lora={**LORA, **lora})
        return [problem.key for problem in find_hub_problems(recipe, find_shape(name), None)]

    wrong = {"init_lora_weights": "pissa", "target_modules": HEAD}
    assert found("Qwen/Qwen2.5-0.5B", **wrong) == ["lora.target_modules"]
    assert found("Qwen/Qwen2.5-7B", **wrong) == [], "its head is not tied"
    assert found("Qwen/Qwen2.5-7B", target_modules=QV, exclude_modules=["v_proj"]) == ["lora.exclude_modules"]
    monkeypatch.setattr("tunebook.model.model.build_hollow", None)
    assert found("Qwen/Qwen2.5-7B", target_modules=QV) == [], "what the shape tells needs no model"


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"target_modules": None},
        {"target_modules": "all-linear", "modules_to_save": ["lm_head", "k_proj"]},
        {"target_modules": [*HEAD, "embed_tokens"]},
        {"target_modules": HEAD, "layers_to_transform": [1]},
        {"target_modules": QV, "exclude_modules": ["layers.0.self_attn.v_proj"]},
        {"target_modules": ".*(up|down)_proj", "exclude_modules": ".*layers.1.*"},
    ],
)
def test_what_is_adapted_is_what_peft_adapts(lora):
    from peft import LoraConfig, get_peft_model

    from tunebook.model.lora_targets import chosen_targets

    model = hollow()
    said = adapted_modules(model, lora)
    config = LoraConfig(**{**lora, "target_modules": chosen_targets(lora)}, task_type="CAUSAL_LM")
    with quiet_libraries():
        adapted = get_peft_model(model, config, low_cpu_mem_usage=True)
    assert said == adapted.targeted_module_names and said
