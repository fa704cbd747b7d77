"""What `--plan` advises: nothing that is set already, and what helps first."""

import json
from types import SimpleNamespace

import pytest

from tunebook.launching.command_line import read_command
from tunebook.launching.world import world_of
from tunebook.plan.durations import plan_duration
from tunebook.plan.findings import find_data_warnings
from tunebook.plan.plan import build_plan, with_rows
from tunebook.plan.whole_plan import complete_plan
from tunebook.plan.whole_plan_text import render_duration
from tunebook.recipe.reading import load_recipe
from tunebook.recipe.schema import DataSection


@pytest.mark.parametrize(
    ("settings", "equal", "padding", "keys"),
    [
        ({}, 2, 0.0, ["data.deduplicate"]),
        ({}, 1, 0.0, []),
        ({}, None, 0.0, []),
        ({"deduplicate": True}, 50, 0.0, []),
        ({}, 0, 0.5, ["training.per_device_train_batch_size"]),
        ({"packing": True}, 0, 0.5, []),
    ],
)
def test_data_is_warned_of_once_and_only_what_is_not_set(settings, equal, padding, keys):
    data = DataSection(path="rows.jsonl", **settings)
    assert [each.key for each in find_data_warnings(data, 100, equal, padding)] == keys


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.02, "0.2 s in all"), (1, "10 s in all"), (6, "1.0 min in all"), (360, "1.0 h in all")]
)
def test_short_runs_are_told_in_seconds(seconds, shown):
    plan = SimpleNamespace(steps_per_epoch=None, num_optimizer_steps=10)
    assert shown in render_duration(plan_duration(plan, seconds, "measured"))


QLORA = "quantization: {load_in_4bit: true}\n"


@pytest.fixture
def whole(tmp_path):
    """Return the whole plan of a Qwen2.5-7B recipe for 1,000 unknown rows."""

    def make(gpu, sections="lora: {}\n", model="Qwen/Qwen2.5-7B", length=1024, held_out=0, **training):
        path = tmp_path / "case.yaml"
        settings = {"num_train_epochs": 1, "per_device_train_batch_size": 4, **training}
        data = {"path": "a/b", "max_length": length, "validation": held_out}
        text = f"model: {{name_or_path: {model}}}\ndata: {json.dumps(data)}\n{sections}"
        path.write_text(f"{text}training: {json.dumps(settings)}\n")
        recipe = load_recipe(str(path))
        plan = with_rows(build_plan(recipe, world_of(1, "cuda"), run_dir=str(tmp_path)), 1000, 0.0, "--rows")
        command = read_command(("case.yaml", "--plan", "--rows", "1000", *(("--gpu", gpu) if gpu else ())))
        return complete_plan(recipe, plan, command)

    return make


def warnings_of(whole):
    return [each for each in whole.findings if each.kind == "warning"]


@pytest.mark.parametrize(
    ("sections", "gpu", "key", "fix"),
    [
        ("", "24", "lora", "Add a lora section"),
        ("lora: {}\n", "12", "quantization", "Add a quantization section, or take a larger GPU"),
        ("lora: {}\nquantization: {load_in_8bit: true}\n", "8", "quantization", "load_in_4bit: true"),
        (f"lora: {{}}\n{QLORA}", "4", "model.name_or_path", "Take a larger GPU"),
    ],
)
def test_weights_that_fill_the_gpu_are_not_blamed_on_the_batch(whole, sections, gpu, key, fix):
    [warning] = warnings_of(whole(gpu, sections))
    assert "weights, gradients and optimizer alone need" in warning.message and f"of {gpu} GiB" in warning.message
    assert warning.key == key and fix in warning.fix and "max_length" not in warning.fix


def test_a_smaller_micro_batch_comes_first_and_shorter_rows_last(whole):
    planned = whole("24", per_device_train_batch_size=64, activation_checkpointing=False)
    [warning] = warnings_of(planned)
    assert planned.memory.largest_rows < 64
    fixes = warning.fix.split(", or ")
    assert fixes[0] == f"Set training.per_device_train_batch_size: {planned.memory.largest_rows}"
    assert fixes[1:] == ["training.activation_checkpointing: true", "a smaller data.max_length"]
    [warning] = warnings_of(whole("24", per_device_train_batch_size=1, length=32768, activation_checkpointing=True))
    assert "does not fit" in warning.message and warning.fix == "Set a smaller data.max_length"


def test_an_evaluation_that_does_not_fit_is_not_blamed_on_training(whole):
    [warning] = warnings_of(whole("24", held_out=0.1, per_device_eval_batch_size=256))
    assert "does not fit" in warning.message and "for the evaluation" in warning.message
    assert warning.fix == f"Set a smaller {warning.key}" and warning.key == "training.per_device_eval_batch_size"


def test_a_gpu_by_name_gives_an_upper_bound_where_rows_are_unknown(whole):
    planned = whole("a100")
    assert "an upper bound" in planned.duration.source and not any(each.startswith("time") for each in planned.unknown)
    assert planned.duration.hours > whole("h100").duration.hours > whole("h100", length=512).duration.hours > 0


@pytest.mark.parametrize(
    ("gpu", "model", "said", "unsaid"),
    [
        (None, "Qwen/Qwen2.5-7B", "--gpu NAME", "shape"),
        ("24", "Qwen/Qwen2.5-7B", "a name in place of GiB", "--gpu NAME"),
        ("a100", "someone/else", "the shape of the model is not known", "--gpu NAME"),
    ],
)
def test_what_is_missing_for_the_time_is_not_what_was_given(whole, gpu, model, said, unsaid):
    [line] = [each for each in whole(gpu, model=model).unknown if each.startswith("time")]
    assert said in line and unsaid not in line and "--step-seconds" in line
