"""The receipt of a recipe: what `tunebook bench` writes, and what plans and later runs make of it."""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from tunebook.errors import Refused
from tunebook.launching.world import World
from tunebook.plan.plan import build_plan
from tunebook.recipe.reading import load_recipe
from tunebook.runs.identity import recipe_identity, taken_over
from tunebook.runs.receipts import (
    TIMED_SETTINGS,
    find_step_seconds,
    loss_band,
    read_receipt,
    receipt_path,
    write_receipt,
)
from tunebook.system.writing import write_whole


def entry(**values):
    speeds = {"median": 100.0, "least": 90.0, "most": 110.0}
    known = {"hardware": "a", "device": "cpu", "num_processes": 1, "identity": {}, "loss_band": [], "date": "1"}
    known["seeds"] = [1, 2, 3]
    return {**known, "tokens_per_second": speeds, "seconds_per_step": 2.5, **values}


def test_a_band_has_the_losses_of_all_seeds_and_twice_as_much_on_either_side():
    curves = [[(1, 4.0), (2, 2.0)], [(1, 5.0), (2, 2.0)]]
    wide, flat = loss_band(curves)
    assert wide["steps"] == [1, 1] and wide["loss"] == pytest.approx([2.0, 7.0])
    usual = 0.2 / 2**0.5  # one part of two in which the least is a fifth below the most
    assert flat["steps"] == [2, 2] and flat["loss"] == pytest.approx([2 - 2 * 2 * usual, 2 + 2 * 2 * usual])
    [alone] = loss_band([[(1, 2.0)]])
    assert alone["loss"] == pytest.approx([1.96, 2.04])


@pytest.mark.parametrize("num_parts", [1, 6, 10])
@pytest.mark.parametrize("together", [0.0, 0.6], ids=["independent parts", "parts that move together"])
@pytest.mark.parametrize("most", [1.0, 3.0], ids=["even", "uneven"])
def test_a_run_with_another_seed_seldom_leaves_the_band_of_three(num_parts, together, most):
    drawn, outside, num_trials = random.Random(5), 0, 2000
    level = [4.0 / (1 + part) for part in range(num_parts)]
    apart = [0.01 * (1 + (most - 1) * part / num_parts) for part in range(num_parts)]
    for _ in range(num_trials):
        curves = []
        for _seed in range(4):
            shared = together**0.5 * drawn.gauss(0, 1)
            noise = [shared + (1 - together) ** 0.5 * drawn.gauss(0, 1) for _ in level]
            curves.append([(part + 1, level[part] * (1 + apart[part] * noise[part])) for part in range(num_parts)])
        band = loss_band(curves[:3])
        losses = [loss for _, loss in curves[3]]
        outside += any(not one["loss"][0] <= loss <= one["loss"][1] for one, loss in zip(band, losses, strict=True))
    assert outside / num_trials < 0.06


@pytest.mark.parametrize("steps", [1, 9, 10, 11, 94, 100])
def test_parts_are_at_most_ten_and_hold_each_step_once(steps):
    curve = [(step + 1, float(step)) for step in range(steps)]
    parts = [part["steps"] for part in loss_band([curve])]
    assert len(parts) <= 10 and parts[0][0] == 1 and parts[-1][1] == steps
    assert all(one[1] + 1 == other[0] for one, other in pairwise(parts))
    assert loss_band([[]]) == []


def test_the_parts_are_named_by_the_steps_that_the_logged_losses_cover():
    curve = [(step, 1.0) for step in (1, *range(10, 91, 10), 94)]
    parts = [part["steps"] for part in loss_band([curve])]
    assert parts == [[1, 10], [11, 30], [31, 50], [51, 70], [71, 90], [91, 94]]


def test_an_entry_replaces_that_of_the_same_hardware_and_processes(tmp_path):
    path = receipt_path(str(tmp_path / "mine.yaml"))
    assert path.name == "mine.receipt.json" and read_receipt(path) == []
    for one in (entry(date="1"), entry(date="2", num_processes=2), entry(date="3")):
        write_receipt(path, one)
    assert [one["date"] for one in read_receipt(path)] == ["2", "3"]


def test_entries_that_are_written_in_the_same_moment_are_all_kept(tmp_path, monkeypatch):
    def write_later(*given):
        time.sleep(0.05)  # long enough for all others to read what is there
        write_whole(*given)

    monkeypatch.setattr("tunebook.runs.receipts.write_whole", write_later)
    path, numbers = tmp_path / "mine.receipt.json", [1, 2, 3, 4]
    with ThreadPoolExecutor(len(numbers)) as pool:  # each opens the folder anew, as processes would
        list(pool.map(lambda number: write_receipt(path, entry(num_processes=number)), numbers))
    assert sorted(one["num_processes"] for one in read_receipt(path)) == numbers
    assert list(tmp_path.iterdir()) == [path], "nothing is left beside it"


def test_a_trial_with_other_values_replaces_only_its_own_earlier_entry(tmp_path):
    path = receipt_path(str(tmp_path / "mine.yaml"))
    longer = entry(date="2", trial=True, identity={"training.max_steps": 2})
    packed = entry(date="4", trial=True, settings={"data.packing": True})
    for one in (entry(date="1"), longer, {**longer, "date": "3"}, packed, {**packed, "date": "5"}):
        write_receipt(path, one)
    assert [one["date"] for one in read_receipt(path)] == ["1", "3", "5"]
    write_receipt(path, entry(date="6"))
    assert [one["date"] for one in read_receipt(path)] == ["6"], "measured anew, with what was tried forgotten"


@pytest.mark.parametrize(
    ("change", "serves"),
    [
        ({}, True),
        ({"training.learning_rate": 1.0}, True),
        ({"training.num_train_epochs": 9}, True),
        ({"training.torch_compile": True}, False),
        ({"training.neftune_noise_alpha": 5.0}, False),
        ({"data.template": "chatml"}, False),
        ({"training.global_batch_size": 80}, False),
        ({"lora.r": 64}, False),
        ({"quantization": "given"}, False),
        ({"data.max_length": 17}, False),
        ({"base model": "org/another@main"}, False),
        ({"settings": {"data.packing": True}}, False),
        ({"settings": {"data.path": "org/longer-rows"}}, False),
        ({"settings": {"training.per_device_train_batch_size": 3}}, False),
        ({"settings": {"training.activation_checkpointing": False}}, False),
        ({"settings": {"training.fused_loss": "off"}}, False),
        ({"settings": {"training.dataloader_num_workers": 2}}, False),
        ({"settings": {"training.logging_steps": 1}}, True),
    ],
    ids=str,
)
def test_the_time_of_a_step_is_that_of_the_same_model_batch_and_method(tmp_path, change, serves):
    (tmp_path / "mine.yaml").write_text("model: {name_or_path: org/base}\nlora: {r: 8}\ndata: {path: org/rows}\n")
    recipe = load_recipe(str(tmp_path / "mine.yaml"))
    plan = build_plan(recipe, World())
    now = taken_over(recipe, plan)
    settings = {name: now.get(name) for name in TIMED_SETTINGS} | change.get("settings", {})
    others = {key: value for key, value in change.items() if key != "settings"}
    identity = {"base model": "org/base@main", **recipe_identity(recipe, plan), **others}
    place = {"num_processes": plan.world_size, "device": plan.device_type, "date": "1"}
    one = entry(identity=identity, settings=settings, **place)
    write_receipt(receipt_path(recipe.path), {**one, "seconds_per_step": 2.5})
    found = find_step_seconds(recipe, plan, None)
    assert (found is not None and found[0] == 2.5) == serves


@pytest.mark.parametrize(
    ("hardware", "asked", "serves"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100", True),
        ("NVIDIA A100-PCIE-40GB", "a100-40", True),
        ("NVIDIA A100-SXM4-40GB", "a100", False),
        ("NVIDIA H100 80GB HBM3", "H100", True),
        ("NVIDIA H100 PCIe", "h100", False),
        ("NVIDIA GeForce RTX 4090", "4090", True),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "4090", False),
        ("NVIDIA H200", None, True),
    ],
)
def test_the_time_on_a_gpu_that_is_asked_about_is_that_of_this_very_gpu(tmp_path, hardware, asked, serves):
    (tmp_path / "mine.yaml").write_text("model: {name_or_path: org/base}\nlora: {r: 8}\ndata: {path: org/rows}\n")
    recipe = load_recipe(str(tmp_path / "mine.yaml"))
    plan = build_plan(recipe, World())
    identity = {"base model": "org/base@main", **recipe_identity(recipe, plan)}
    settings = {name: taken_over(recipe, plan).get(name) for name in TIMED_SETTINGS}
    place = {"num_processes": plan.world_size, "device": plan.device_type, "hardware": hardware}
    write_receipt(receipt_path(recipe.path), entry(identity=identity, settings=settings, **place))
    assert (find_step_seconds(recipe, plan, asked) is not None) == serves


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "[" * 100_000, '{"measured": {}}', '{"measured": [{}]}', '{"measured": 3}', "\xff"]
)
def test_what_is_no_receipt_is_refused_by_its_place(tmp_path, content):
    path = tmp_path / "mine.receipt.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(Refused, match=r"mine\.receipt\.json: is no receipt"):
        read_receipt(path)


@pytest.mark.parametrize(
    "change",
    [
        *({name: None} for name in entry() if name not in ("hardware", "device", "date")),
        {"tokens_per_second": {}},
        {"num_processes": float("inf")},
        *({"seconds_per_step": wrong} for wrong in (float("nan"), float("inf"), 0, -2.5, "soon")),
        {"tokens_per_second": {"median": float("nan")}},
        {"tokens_per_second": {"median": 0}},
        {"loss_band": [{"steps": [1, 2], "loss": [1.0, float("nan")]}]},
        {"seeds": "all"},
        {"num_processes": 2.7},
        {"seconds_per_step": True},
        {"seconds_per_step": "1.5"},
        {"hardware": None},
        {"identity": None},
        {"settings": [1]},
        {"identity": [[1, 2]]},
        {"loss_band": [{}]},
        {"loss_band": [{"steps": [1], "loss": [1.0, 2.0]}]},
        {"loss_band": [{"steps": [1, 2], "loss": [1.0, None]}]},
    ],
    ids=str,
)
def test_an_entry_that_would_fail_later_is_refused_when_it_is_read(tmp_path, change):
    path = tmp_path / "mine.receipt.json"
    write_receipt(path, entry())
    assert len(read_receipt(path)) == 1
    path.write_text(json.dumps({"measured": [entry(**change)]}))
    with pytest.raises(Refused, match=r"mine\.receipt\.json: is no receipt"):
        read_receipt(path)


@pytest.mark.parametrize("name", entry())
def test_an_entry_that_lacks_what_is_read_later_is_refused(tmp_path, name):
    path = tmp_path / "mine.receipt.json"
    path.write_text(json.dumps({"measured": [{key: value for key, value in entry().items() if key != name}]}))
    with pytest.raises(Refused, match=r"mine\.receipt\.json: is no receipt"):
        read_receipt(path)
