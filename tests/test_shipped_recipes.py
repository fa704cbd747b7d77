"""The recipes that are shipped: which there are, what they say of hardware, and that one reads as a diff of another."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from checkout import ROOT
from tiny_data import shared
from tunebook.launching.world import world_of
from tunebook.model.shapes import find_shape
from tunebook.plan.gpu_fit import load_gpu_sizes, plan_on_gpus, smallest_gpu
from tunebook.plan.memory import GIB
from tunebook.plan.memory_plan import find_memory_warnings, plan_memory
from tunebook.plan.plan import build_plan
from tunebook.recipe.reading import load_recipe

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
HARDWARE = re.compile(r"# .* Hardware: (?:(\d+) x (\d+) GB GPU|any \d+ CPU cores\.)")
# The stem of each recipe, its model and its method.
SHIPPED = {
    "gemma2_9b_qlora": ("google/gemma-2-9b", "QLoRA, 4-bit base"),
    "llama3_1_8b_qlora": ("meta-llama/Llama-3.1-8B", "QLoRA, 4-bit base"),
    "llama3_2_1b_qlora": ("meta-llama/Llama-3.2-1B", "QLoRA, 4-bit base"),
    "mistral7b_qlora": ("mistralai/Mistral-7B-v0.3", "QLoRA, 4-bit base"),
    "phi4_qlora": ("microsoft/phi-4", "QLoRA, 4-bit base"),
    "qwen0_5b_qlora": ("Qwen/Qwen2.5-0.5B", "QLoRA, 4-bit base"),
    "qwen1_5b_qlora": ("Qwen/Qwen2.5-1.5B", "QLoRA, 4-bit base"),
    "qwen3b_qlora": ("Qwen/Qwen2.5-3B", "QLoRA, 4-bit base"),
    "qwen7b_qlora": ("Qwen/Qwen2.5-7B", "QLoRA, 4-bit base"),
    "qwen14b_qlora": ("Qwen/Qwen2.5-14B", "QLoRA, 4-bit base"),
    "qwen32b_qlora": ("Qwen/Qwen2.5-32B", "QLoRA, 4-bit base"),
    "qwen72b_qlora": ("Qwen/Qwen2.5-72B", "QLoRA, 4-bit base"),
    "qwen7b_lora": ("Qwen/Qwen2.5-7B", "LoRA"),
    "qwen7b_full": ("Qwen/Qwen2.5-7B", "full fine-tune"),
    "qwen7b_instruct_qlora": ("Qwen/Qwen2.5-7B-Instruct", "QLoRA, 4-bit base"),
    "qwen3_8b_qlora": ("Qwen/Qwen3-8B", "QLoRA, 4-bit base"),
    "smollm2_135m_qlora": ("HuggingFaceTB/SmolLM2-135M", "QLoRA, 4-bit base"),
    "tiny_qlora": ("assets/tiny-qwen2", "QLoRA, 4-bit base"),
}
# What a recipe for another model may say otherwise than the 7B one; all else of it is the same.
OWN = {
    "model.name_or_path",
    "lora.r",
    "lora.lora_alpha",
    "training.per_device_train_batch_size",
    "training.learning_rate",
    "training.num_train_epochs",
}


@pytest.fixture(params=RECIPES, ids=lambda path: path.stem)
def path(request, monkeypatch) -> Path:
    monkeypatch.chdir(ROOT)
    return request.param


def keys(path: Path) -> dict:
    resolved = load_recipe(str(path)).resolved
    return {f"{section}.{key}": value for section, values in resolved.items() for key, value in values.items()}


def test_every_recipe_is_there_and_is_what_its_name_says(path):
    recipe = load_recipe(str(path))
    plan = build_plan(recipe, world_of(1, "cuda"))
    assert (plan.model, plan.method) == SHIPPED[path.stem]
    assert {other.stem for other in RECIPES} == set(SHIPPED)


def test_the_first_comment_names_the_hardware(path):
    first = path.read_text(encoding="utf-8").splitlines()[0]
    found = HARDWARE.fullmatch(first)
    assert found, first
    assert (found[1] is None) == (path.stem == "tiny_qlora")
    assert len(first) <= 120


def test_what_the_plan_says_it_takes_fits_the_hardware_it_names(path):
    """And with something to spare, but not on half of it; no GPU smaller than 8 GB is named."""
    recipe = load_recipe(str(path))
    found = HARDWARE.fullmatch(path.read_text(encoding="utf-8").splitlines()[0])
    count, size = int(found[1] or 1), int(found[2] or 1)
    plan, shape = build_plan(recipe, world_of(count, "cuda")), find_shape(recipe.model.name_or_path)
    memory = plan_memory(recipe, plan, shape, None, size)
    assert memory.fits and not find_memory_warnings(memory, recipe, plan)
    assert memory.rows == recipe.arguments["per_device_train_batch_size"] and memory.length == recipe.data.max_length
    if found[1]:
        assert size == 8 or memory.needed > 0.5 * size * GIB
    else:  # on the CPU it takes less than a gigabyte
        assert memory.needed < GIB


def readme_row(path: Path) -> str:
    """Return what README says of a recipe: model, method, memory of a process by the plan, hardware."""
    recipe = load_recipe(str(path))
    found = HARDWARE.fullmatch(path.read_text(encoding="utf-8").splitlines()[0])
    plan, shape = build_plan(recipe, world_of(1, "cuda")), find_shape(recipe.model.name_or_path)
    memory = f"{plan_memory(recipe, plan, shape, None, None).needed / GIB:.1f} GiB"
    hardware = f"{found[1]} x {found[2]} GB GPU" if found[1] else "2 CPU cores"
    return f"| `{path.stem}` | {plan.model} | {plan.method} | {memory} | {hardware} |"


def test_readme_lists_the_recipe(path):
    assert readme_row(path) in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()


def test_gpus_are_named_by_their_sizes():
    assert load_gpu_sizes() == (16, 24, 32, 40, 48, 80, 141)
    recipe = load_recipe(str(ROOT / "recipes" / "qwen7b_qlora.yaml"))
    plan, shape = build_plan(recipe, world_of(1, "cuda")), find_shape("Qwen/Qwen2.5-7B")
    memory, largest = plan_on_gpus(recipe, plan, shape)
    assert smallest_gpu(memory) == 16
    assert list(largest) == list(load_gpu_sizes()) and largest[16] == 8
    rows = list(largest.values())
    assert rows == sorted(rows) and rows[0] < rows[-1]
    huge = replace(memory, context=2**40)
    assert smallest_gpu(huge) is None


def test_a_qlora_recipe_reads_as_a_diff_of_the_7b_one(path):
    if SHIPPED[path.stem][1] != "QLoRA, 4-bit base" or path.stem == "tiny_qlora":
        assert set(keys(path)) >= {"model.name_or_path", "data.path", "training.learning_rate"}
        return
    original, other = keys(ROOT / "recipes" / "qwen7b_qlora.yaml"), keys(path)
    assert {key for key in original.keys() | other.keys() if original.get(key) != other.get(key)} <= OWN


def test_nothing_in_a_recipe_is_a_fact_of_its_model(path):
    """No chat template, module list or token id: each would have to be changed in a copy."""
    for key, value in keys(path).items():
        assert not isinstance(value, list), key
    assert keys(path).get("lora.target_modules", "all-linear") == "all-linear"


def test_shapes_known_here_count_the_parameters_of_the_models(monkeypatch):
    public = json.loads(shared("assets", "model_configs.json").read_text(encoding="utf-8"))
    counted = {name: find_shape(name).num_parameters for name in public if not name.startswith("karpathy")}
    assert counted == {name: public[name]["params"] for name in counted} and len(counted) == 15


@pytest.mark.parametrize(
    "name", ["google/gemma-2-9b-it", "Qwen/Qwen2.5-7B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"]
)
def test_a_chat_model_has_the_shape_of_its_base(name):
    assert find_shape(name) == find_shape(name.removesuffix("-it").removesuffix("-Instruct"))
