"""Hours of a run from the seconds of a step, a receipt, or a GPU's rate."""

import json
from dataclasses import replace

import pytest

from tunebook.errors import Refused
from tunebook.launching.world import world_of
from tunebook.model.shapes import find_shape
from tunebook.plan.durations import plan_duration, read_gpu, read_step_seconds, step_seconds_of
from tunebook.plan.plan import Plan, build_plan, with_rows
from tunebook.recipe.reading import load_recipe


@pytest.fixture
def plan(tmp_path) -> Plan:
    path = tmp_path / "case.yaml"
    path.write_text(
        "model: {name_or_path: Qwen/Qwen2.5-7B}\ndata: {path: a/b}\nlora: {}\n"
        "training: {per_device_train_batch_size: 4, num_train_epochs: 3, activation_checkpointing: false}\n"
    )
    return build_plan(load_recipe(str(path)), world_of(1, "cuda"), run_dir=str(tmp_path / "run"))


def test_alpaca_at_batch_4_and_0_8_seconds(plan):
    duration = plan_duration(with_rows(plan, 52002, 0.0, "--rows"), 0.8, "--step-seconds")
    assert duration.steps_per_epoch == 13001
    assert duration.epoch_hours == pytest.approx(2.9, abs=0.05)
    assert duration.hours == pytest.approx(8.7, abs=0.05)


def test_hours_wait_for_rows_and_steps_alone_give_the_whole(plan):
    assert plan_duration(plan, 0.8, "").hours is None
    limited = replace(plan, max_steps=450, num_optimizer_steps=450)
    assert plan_duration(limited, 0.8, "").hours == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("text", "memory"), [("24", 24), ("24GB", 24), (" 22.5 GiB", 22.5), ("A100", 80), ("a100-40", 40), ("4090", 24)]
)
def test_gpus_by_size_or_name(text, memory):
    assert read_gpu(text).memory_gib == memory


@pytest.mark.parametrize("text", ["", "huge", "-1", "0", "nan", "inf", "24 GPUs", "1e9"])
def test_what_is_no_gpu_is_refused_with_those_known(text):
    with pytest.raises(Refused, match="a100"):
        read_gpu(text)


def test_a_receipt_counts_only_for_the_same_recipe_and_world(plan, tmp_path):
    place = tmp_path / "run_summary.json"
    receipt = {"status": "completed", "recipe_sha256": "abc", "world_size": 1, "device": "cuda"}
    receipt |= {"training_seconds": 50.0, "num_optimizer_steps": 100}
    for change, expected in (
        ({}, 0.5),
        ({"status": "failed"}, None),
        ({"recipe_sha256": "other"}, None),
        ({"world_size": 2}, None),
        ({"device": "cpu"}, None),
        ({"went_on_from_step": 40}, None),
        ({"training_seconds": None}, None),
        ({"num_optimizer_steps": 0}, None),
        ({"num_optimizer_steps": float("inf")}, None),
    ):
        place.write_text(json.dumps(receipt | change))
        assert read_step_seconds(str(tmp_path), "abc", plan) == expected, change
    for text in ("", "[]", "{", "null", json.dumps([receipt]), "[" * 100_000):
        place.write_text(text)
        assert read_step_seconds(str(tmp_path), "abc", plan) is None
    place.unlink()
    assert read_step_seconds(str(tmp_path), "abc", plan) is None


def test_the_rate_gives_the_seconds_that_its_operations_take(plan):
    shape = find_shape("Qwen/Qwen2.5-7B")
    assert shape is not None

    def seconds(plan: Plan = plan, tokens: float = 1024, gpu: str = "a100") -> float:
        found = step_seconds_of(shape, plan, tokens, 256, read_gpu(gpu))
        assert found
        return found

    # 7.07 B weights in products, 4 operations each for LoRA, at 0.4 x 312 TFLOP/s; attention adds a little.
    assert seconds() == pytest.approx(1024 * 4 * 7.07e9 / (0.4 * 312e12), rel=0.02)
    assert seconds(tokens=2048) == pytest.approx(2 * seconds())
    assert seconds(replace(plan, world_size=2)) == pytest.approx(seconds() / 2)
    assert seconds(replace(plan, activation_checkpointing=True)) == pytest.approx(seconds() * 1.5, rel=0.01)
    full = replace(plan, trainable_parameters=shape.num_parameters)
    assert seconds(full) == pytest.approx(seconds() * 1.5, rel=0.01)
    assert step_seconds_of(shape, plan, 1024, 256, read_gpu("24")) is None
