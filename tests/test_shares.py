"""What of a model is quantised and what gets LoRA is said where it is not all of it."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tiny_models import build_tiny_tokenizer
from tiny_training import LORA, NF4, build_recipe
from tunebook.launching.world import World
from tunebook.model.model import (
    build_hollow,
    build_model,
    find_model_notes,
    find_model_problems,
    load_architecture,
    load_base,
)
from tunebook.model.shares import quantised_layers
from tunebook.plan.plan import build_plan
from tunebook.system.quiet import quiet_libraries

pytestmark = pytest.mark.slow
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "vocab_size": 420}
SIZES |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 3}
KINDS = {
    "Falcon": {},
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "Qwen2": {"tie_word_embeddings": True},
}
EXPERTS = "mlp.experts.down_proj, mlp.experts.gate_up_proj, mlp.gate"


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A tiny model of each kind with random weights."""
    made = {}
    for kind, more in KINDS.items():
        made[kind] = tmp_path_factory.mktemp("bases") / kind
        config = getattr(transformers, f"{kind}Config")(**{**SIZES, **more})
        torch.manual_seed(0)
        with quiet_libraries():
            AutoModelForCausalLM.from_config(config).save_pretrained(made[kind])
            build_tiny_tokenizer().save_pretrained(made[kind])
    return made


def look(base, **recipe):
    made = build_recipe(base, **recipe)
    plan = build_plan(made, World(), run_dir="runs/tiny")
    problems, notes = find_model_problems(made, plan, build_tiny_tokenizer(), 40)
    return made, plan, [problem.render() for problem in problems], notes


def test_a_model_without_a_layer_in_4_bits_is_refused(bases):
    [problem] = look(bases["Falcon"], quantization=NF4)[2]
    assert "quantization: transformers quantises no FalconLinear" in problem and "Remove the section" in problem
    assert look(bases["Falcon"])[2:] == ([], []), "plain LoRA reaches all of it"


@pytest.mark.parametrize(
    ("kind", "notes"),
    [
        ("Mixtral", [f"quantization: 11% of the weights of all layers are in 4 bits; {EXPERTS} stay in float32"]),
        (
            "Qwen2Moe",
            [
                f"quantization: 50% of the weights of all layers are in 4 bits; {EXPERTS} stay in float32",
                f"lora: 50% of the weights of all layers get LoRA; {EXPERTS} get none",
            ],
        ),
        ("GPT2", []),
        ("Qwen2", []),
    ],
)
def test_what_is_said_without_weights_is_what_is_measured_with_them(bases, kind, notes):
    recipe, plan, problems, said = look(bases[kind], quantization=NF4)
    assert (problems, said) == ([], notes)
    model = build_model(recipe, plan, World(), build_tiny_tokenizer())
    assert find_model_notes(recipe, plan, model) == notes


def test_the_rule_is_that_of_transformers(bases):
    for kind in ("Mixtral", "GPT2", "Qwen2"):
        for more in ({}, {"llm_int8_skip_modules": ["q_proj", "c_attn"]}):
            recipe, plan, _, _ = look(bases[kind], quantization={**NF4, **more})
            said = quantised_layers(build_hollow(recipe, load_architecture(recipe)), recipe.quantization)
            base = load_base(recipe, plan, World())
            assert said == {name for name, module in base.named_modules() if type(module).__name__ == "Linear4bit"}
            assert said


def test_a_skipped_name_that_keeps_nothing_is_refused(bases):
    """transformers compares whole paths and their ends: a block's name keeps none of the layers inside it."""
    skipped = {**NF4, "llm_int8_skip_modules": ["mlp", "q_prj", "o_proj", "lm_head", "model.layers.0"]}
    problems = look(bases["Qwen2"], quantization=skipped)[2]
    assert len(problems) == 2
    for problem, name in zip(problems, ("mlp", "q_prj"), strict=True):
        assert f"quantization.llm_int8_skip_modules: {name} matches no linear layer" in problem


def test_experts_named_as_parameters_get_lora(bases):
    named = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    assert look(bases["Qwen2Moe"], lora={**LORA, "target_parameters": named})[2:] == ([], [])
    assert look(bases["Qwen2Moe"], lora={**LORA, "target_modules": ["q_proj"]})[2:] == ([], []), "as it was asked"
