"""Copying a recipe works: the 7B recipe with another model trains on every architecture, and comes back whole."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from architectures import ARCHITECTURES, build_architecture
from copying_scenarios import RECIPE, copy_recipe, write_rows
from tunebook.errors import Refused
from tunebook.launching.world import World
from tunebook.plan.plan import build_plan
from tunebook.recipe.reading import load_recipe

pytestmark = [pytest.mark.slow, pytest.mark.long]  # minutes in all: in `make test-slow`
TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("copies")


@pytest.fixture(scope="module")
def found(folder):
    """What one process found that trained every architecture after the other."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "TUNEBOOK_CACHE": str(folder / "cache")}
    script = [sys.executable, str(TESTS / "copying_scenarios.py"), str(folder)]
    ended = subprocess.run(script, env=environ, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(params=ARCHITECTURES)
def case(request, found):
    """An architecture, and what its run was."""
    assert "refused" not in found[request.param], found[request.param]
    return ARCHITECTURES[request.param], found[request.param]


def test_a_copy_differs_in_the_model_and_two_keys_of_the_test(found, folder):
    def keys(path: Path) -> dict:
        resolved = load_recipe(str(path)).resolved
        return {f"{section}.{key}": value for section, values in resolved.items() for key, value in values.items()}

    original = keys(RECIPE)
    for name in ARCHITECTURES:
        copy = keys(folder / f"{name}.yaml")
        changed = {key for key in original.keys() | copy.keys() if original.get(key) != copy.get(key)}
        assert changed == {"model.name_or_path", "data.path", "training.num_train_epochs"}


def test_two_steps_train_every_part_of_the_adapter(case):
    _, run = case
    assert run["steps"] == 2
    assert all(math.isfinite(loss) and 5 < loss < 7 for loss in run["losses"]), "about log(420) at random weights"
    assert run["untrained"] == [] and run["moved"] > 0.01


def test_lora_is_on_every_linear_layer_and_on_nothing_else(case):
    architecture, run = case
    parts = {"qkv_proj": "self_attn", "gate_up_proj": "mlp", "gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp"}
    layers = [
        f"model.layers.{layer}.{parts.get(name, 'self_attn')}.{name}"
        for layer in (0, 1)
        for name in architecture.targets
    ]
    assert run["targets"] == list(architecture.targets), "by their short names, so that every loader knows them"
    assert run["found"] == run["four_bit"] == sorted(layers), "all in 4 bits, and all adapted"
    assert run["head"] == "Linear" and run["embedding"].endswith("Embedding")


def test_tied_embeddings_stay_tied_and_others_apart(case):
    architecture, run = case
    assert run["tied"] is architecture.tied


def test_the_plan_counts_parameters_as_the_model_has_them(case):
    _, run = case
    assert run["planned"] == run["counted"]


def test_the_adapter_that_is_loaded_back_gives_equal_logits(case):
    _, run = case
    assert run["difference"] == 0


def test_each_model_keeps_its_own_attention(case):
    architecture, run = case
    assert run["attention"] == architecture.attention
    said = [note for note in run["notes"] if note.startswith("attention is eager")]
    assert len(said) == (architecture.attention == "eager")
    assert run["head_norms"] == (["k_norm", "q_norm"] if architecture.kind == "Qwen3" else [])


def test_prompt_padding_and_stop_token_follow_the_tokenizer(found):
    told = {name: (run["template"], run["pad"], run["stop"]) for name, run in found.items()}
    chat = "chat template of the model"
    assert told["Qwen2.5-7B"] == (chat, "<|pad|>", "<|im_end|>")
    assert told["Llama-3.1-8B"] == ("alpaca text", "<|endoftext|>", "<|endoftext|>"), "a base without a template"
    assert told["Mistral-7B-v0.3"] == (chat, "<unk>", "</s>")
    assert told["Gemma-2-9B"] == (chat, "<pad>", "<end_of_turn>")


def test_an_attention_that_cannot_cap_scores_is_refused_for_gemma2_alone(tmp_path):
    write_rows(tmp_path)
    recipes = [
        load_recipe(str(copy_recipe(tmp_path, build_architecture(name, tmp_path / name))))
        for name in ("Gemma-2-9B", "Qwen2.5-7B")
    ]
    gemma, qwen = (
        replace(recipe, model=recipe.model.model_copy(update={"attn_implementation": "sdpa"})) for recipe in recipes
    )
    with pytest.raises(Refused, match=r"model.attn_implementation: sdpa cannot cap .* Remove it .eager is used then"):
        build_plan(gemma, World())
    assert build_plan(qwen, World()).notes == build_plan(recipes[1], World()).notes


def test_long_rope_turns_short_rows_by_their_neighbours(tmp_path):
    """A canary: once this fails, transformers chooses the frequencies of each row by itself and check_rope can go."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(build_architecture("Phi-3.5-mini", tmp_path / "phi"), dtype="float32")
    assert model.config.rope_parameters["original_max_position_embeddings"] == 1024, "what check_rope is given"
    short, long = torch.arange(5, 25), torch.arange(1100) % 400
    mask = torch.zeros(2, len(long), dtype=torch.long)
    mask[0, : len(short)], mask[1] = 1, 1
    both = torch.stack([torch.nn.functional.pad(short, (0, len(long) - len(short))), long])
    with torch.no_grad():
        alone = model.eval()(input_ids=short[None]).logits[0]
        beside = model(input_ids=both, attention_mask=mask).logits[0, : len(short)]
        inside = model(input_ids=both[:, :1000], attention_mask=mask[:, :1000]).logits[0, : len(short)]
    assert (alone - inside).abs().max() < 1e-5
    assert (alone - beside).abs().max() > 1e-4
