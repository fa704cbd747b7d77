"""The model of a run: where it starts, in which types it is held, and what is refused before weights load."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig

import tunebook.model.model
from tiny_training import LORA, NF4, build_base, build_data, build_recipe, plan_of
from tunebook.errors import Refused
from tunebook.launching.world import World
from tunebook.model.adapter import adapter_tensors, tensor_sha256
from tunebook.model.lora_targets import short_names
from tunebook.model.model import build_model, check_positions, find_model_problems

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return build_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def tokenizer(base):
    return AutoTokenizer.from_pretrained(base)


def built(recipe, tokenizer, world=None, dtype="float32"):
    plan = plan_of(build_recipe("org/any"), World(), build_data(), "runs/tiny")
    return build_model(recipe, replace(plan, compute_dtype=dtype), world or World(), tokenizer)


def refused(recipe, tokenizer, monkeypatch) -> str:
    """Return the refusal of a recipe, and fail if weights were read on the way to it."""

    def read_weights(*args, **kwargs):
        raise AssertionError("weights were read before the refusal")

    monkeypatch.setattr(tunebook.model.model, "load_base", read_weights)
    with pytest.raises(Refused) as refusal:
        built(recipe, tokenizer)
    return refusal.value.render()


def test_adapter_starts_from_the_seed_alone(base, tokenizer):
    starts = set()
    for quantization in (None, NF4):
        for noise in (1, 2):
            torch.manual_seed(noise)  # what was drawn before must not matter
            model = built(build_recipe(base, quantization=quantization), tokenizer)
            starts.add(tensor_sha256(adapter_tensors(model)))
    assert len(starts) == 1
    assert tensor_sha256(adapter_tensors(built(build_recipe(base, seed=1), tokenizer))) not in starts


@pytest.mark.parametrize("quantization", [None, NF4], ids=["plain", "nf4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_trained_is_float32_and_the_rest_the_compute_type(base, tokenizer, quantization, dtype):
    recipe = build_recipe(base, quantization=quantization, lora={**LORA, "modules_to_save": ["lm_head"]})
    model = built(recipe, tokenizer, dtype=dtype)
    trained = {str(parameter.dtype) for parameter in model.parameters() if parameter.requires_grad}
    frozen = {str(parameter.dtype) for parameter in model.parameters() if not parameter.requires_grad}
    assert trained == {"torch.float32"}
    assert frozen == {f"torch.{dtype}"} | ({"torch.uint8"} if quantization else set())
    assert not model.config.use_cache


def test_a_full_fine_tune_trains_everything_in_float32(base, tokenizer):
    model = built(build_recipe(base, lora=None), tokenizer, dtype="bfloat16")
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in model.parameters())


def test_quantised_layers_are_nf4_with_double_quantisation_and_the_head_is_not(base, tokenizer):
    from bitsandbytes.nn import Linear4bit

    model = built(build_recipe(base, quantization=NF4), tokenizer).get_base_model()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear4bit)}
    assert len(layers) == 14
    for layer in layers.values():
        assert layer.quant_state.quant_type == "nf4" and layer.quant_state.nested
        assert layer.compute_dtype == torch.float32
        # Upstream repacks weights in eval mode on CPUs with AVX512-BF16; it must stay possible to forbid it.
        assert layer.support_avx512bf16_for_cpu is False
    assert type(model.lm_head) is torch.nn.Linear


@pytest.mark.parametrize("quantization", [None, NF4], ids=["plain", "nf4"])
def test_an_evaluation_changes_neither_the_base_nor_its_gradient(base, tokenizer, quantization):
    model = built(build_recipe(base, quantization=quantization), tokenizer)
    ids = torch.arange(12).reshape(1, 12)

    def gradient():
        model.train()
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}

    before = gradient()
    model.eval()
    with torch.no_grad():
        model(input_ids=ids)
    after = gradient()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_lora_names_that_match_nothing_are_all_named_with_what_is_near(base, tokenizer, monkeypatch):
    lora = {
        "target_modules": ["q_proj", "v_proj", "gate_projj", "W_pack"],
        "modules_to_save": ["lm_haed"],
        "exclude_modules": ["o_prj"],
        "rank_pattern": {"k_projj": 2},
        "alpha_pattern": {"up_projj": 2},
        "layers_to_transform": [0, 7],
        "trainable_token_indices": [5, 9999],
    }
    report = refused(build_recipe(base, lora=lora), tokenizer, monkeypatch)
    assert report.startswith("refused: 8 problems")
    for key, name, near in [
        ("target_modules", "gate_projj", "gate_proj"),
        ("modules_to_save", "lm_haed", "lm_head"),
        ("exclude_modules", "o_prj", "o_proj"),
        ("rank_pattern", "k_projj", "k_proj"),
        ("alpha_pattern", "up_projj", "up_proj"),
    ]:
        line = next(line for line in report.splitlines() if f"lora.{key}: {name} " in line)
        assert near in line.split("Nearest: ")[1].split(". ")[0]
        assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in line
    assert "lora.target_modules: W_pack matches no module" in report
    assert "lora.layers_to_transform: this model has no layer 7" in report
    assert "lora.trainable_token_indices: the embedding of this model has no row 9999" in report
    assert "q_proj matches no" not in report


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"target_modules": "q_proj"}, ["lora.target_modules", "pattern for the whole path", "q_proj"]),
        ({"target_modules": ["self_attn"]}, ["lora.target_modules", "self_attn is a block of layers", "q_proj"]),
        ({"target_parameters": ["nothing"]}, ["lora.target_parameters", "nothing matches no parameter"]),
        ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, ["lora.exclude_modules: q_proj", "no LoRA"]),
    ],
)
def test_an_adapter_that_cannot_be_is_refused(base, tokenizer, monkeypatch, lora, words):
    report = refused(build_recipe(base, lora=lora), tokenizer, monkeypatch)
    assert all(word in report for word in words), report


@pytest.mark.parametrize("target", [".*q_proj", ["self_attn.q_proj"], ["model.layers.0.mlp.up_proj"], "all-linear"])
def test_every_way_to_name_a_target_is_taken(base, tokenizer, target):
    model = built(build_recipe(base, lora={"r": 2, "target_modules": target}), tokenizer)
    assert model.targeted_module_names


def test_a_base_with_too_few_rows_for_the_tokenizer_is_refused(tmp_path, tokenizer, monkeypatch):
    small = build_base(tmp_path / "small", vocab_size=200, pad_token_id=0, eos_token_id=1)
    report = refused(build_recipe(small), tokenizer, monkeypatch)
    assert "the tokenizer has ids up to 257" in report and "200 rows" in report


def test_quantised_weights_cannot_be_trained_without_an_adapter(base, tokenizer, monkeypatch):
    report = refused(build_recipe(base, lora=None, quantization=NF4), tokenizer, monkeypatch)
    assert "quantization: quantised weights cannot be trained" in report and "Add a lora section" in report


def test_places_without_a_model_are_refused(base, tokenizer, monkeypatch, tmp_path):
    def report(folder) -> str:
        return refused(build_recipe(folder), tokenizer, monkeypatch)

    assert "does not exist" in report(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in report(tmp_path / "empty")
    shutil.copytree(base, tmp_path / "light", ignore=shutil.ignore_patterns("*.safetensors"))
    assert "no weights in" in report(tmp_path / "light") and "model.safetensors" in report(tmp_path / "light")
    shutil.copytree(base, tmp_path / "unknown")
    config = json.loads((base / "config.json").read_text())
    (tmp_path / "unknown" / "config.json").write_text(json.dumps({**config, "model_type": "nothing_we_know"}))
    assert "nothing_we_know" in report(tmp_path / "unknown")
    (tmp_path / "unknown" / "config.json").write_text("{")
    assert "cannot be read" in report(tmp_path / "unknown")


def test_a_hub_that_is_not_there_is_one_line(tokenizer, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    report = refused(build_recipe("nobody/has-this-model"), tokenizer, monkeypatch)
    assert "nobody/has-this-model cannot be read" in report and "\n" not in report


def test_an_architecture_that_is_no_causal_language_model_is_refused(base, tokenizer, monkeypatch, tmp_path):
    shutil.copytree(base, tmp_path / "t5")
    (tmp_path / "t5" / "config.json").write_text(json.dumps({"model_type": "t5", "d_model": 8}))
    report = refused(build_recipe(tmp_path / "t5"), tokenizer, monkeypatch)
    assert "cannot be built" in report and "T5Config" in report


def test_an_attention_that_is_not_installed_is_refused(base, tokenizer, monkeypatch):
    recipe = build_recipe(base, model={"attn_implementation": "flash_attention_2"})
    assert "cannot be built" in refused(recipe, tokenizer, monkeypatch)


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_incomplete_weights_are_refused(base, tokenizer, tmp_path, damage):
    from safetensors.torch import load_file, save_file

    broken = tmp_path / damage
    shutil.copytree(base, broken)
    if damage == "missing":
        tensors = load_file(base / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    else:
        content = (base / "model.safetensors").read_bytes()
        (broken / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(Refused) as refusal:
        built(build_recipe(broken), tokenizer)
    expected = {"missing": "lacks 1 weights, model.layers.1.mlp.up_proj.weight", "cut": "cannot be loaded"}
    assert expected[damage] in refusal.value.render()


def test_short_names_fall_back_to_full_ones_where_they_would_match_more(base, tokenizer):
    model = built(build_recipe(base), tokenizer).get_base_model()
    every = [f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)]
    assert short_names(model, every) == ["q_proj"]
    assert short_names(model, every[:1]) == every[:1]


def test_building_says_nothing(base, tokenizer, capfd):
    built(build_recipe(base, quantization=NF4), tokenizer)
    assert capfd.readouterr() == ("", "")


def test_llama_without_tied_weights_builds_as_well(tmp_path, tokenizer):
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=258, **shape))
    model.save_pretrained(tmp_path / "llama")
    built_model = built(build_recipe(tmp_path / "llama", quantization=NF4), tokenizer)
    assert short_names(built_model.get_base_model(), built_model.targeted_module_names)[0] == "down_proj"


def test_a_model_saved_for_another_task_is_refused(base, tokenizer, monkeypatch, tmp_path):
    shutil.copytree(base, tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    assert "no causal language model" in refused(build_recipe(tmp_path / "other"), tokenizer, monkeypatch)


def test_a_model_that_adds_a_loss_of_its_router_is_refused(base, tokenizer, monkeypatch, tmp_path):
    """It is taken over the rows of a micro-batch, so that the layout would show in the result."""
    shutil.copytree(base, tmp_path / "experts")
    kind = {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
    config = json.loads((tmp_path / "experts" / "config.json").read_text()) | kind
    plan = plan_of(build_recipe("org/any"), World(), build_data(), "runs/tiny")
    for wanted in (True, False):
        (tmp_path / "experts" / "config.json").write_text(json.dumps({**config, "output_router_logits": wanted}))
        problems, _ = find_model_problems(build_recipe(tmp_path / "experts"), plan, tokenizer, 10, with_adapter=False)
        assert ["output_router_logits: false" in problem.fix for problem in problems] == [True] * wanted


def test_the_head_stays_unquantised_beside_other_layers_that_do(base, tokenizer):
    recipe = build_recipe(base, quantization={**NF4, "llm_int8_skip_modules": ["q_proj"]})
    model = built(recipe, tokenizer).get_base_model()
    kinds = {name.rpartition(".")[2]: type(layer).__name__ for name, layer in model.named_modules() if "proj" in name}
    assert type(model.lm_head).__name__ == "Linear" and kinds["k_proj"] != kinds["q_proj"]


def test_rows_longer_than_the_model_has_positions_are_refused(base, tokenizer):
    model = built(build_recipe(base), tokenizer)
    check_positions(build_recipe(base), model, 128, 2)
    with pytest.raises(Refused, match=r"rows of 129 tokens.*Set data.max_length: 128"):
        check_positions(build_recipe(base), model, 129, 2)


def test_layers_that_peft_cannot_train_are_refused_in_one_line(base, tokenizer):
    recipe = build_recipe(base, quantization=NF4, lora={**LORA, "modules_to_save": ["q_proj"]})
    with pytest.raises(Refused) as refusal:
        built(recipe, tokenizer)
    assert "\n" not in refusal.value.render()
