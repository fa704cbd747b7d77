"""TensorBoard and trackio hold what metrics.jsonl does, after any number of lives; neither can end a run."""

import json
import sqlite3

import pytest

from broken_off import events_of, make_place
from finished_runs import train_in
from tiny_data import build_recipe
from tunebook.errors import Refused
from tunebook.recipe.hand_loop import check_hand_loop
from tunebook.training import trackers
from tunebook.training.arguments import _callbacks
from tunebook.training.reporting import ProgressReport
from tunebook.training.trackers import build_trackers, tagged, wanted_trackers

pytestmark = pytest.mark.slow

WANTED = "training.report_to=[tensorboard, trackio]"


def recipe_with(report_to):
    recipe = build_recipe("rows.jsonl")
    recipe.arguments["report_to"] = report_to
    return recipe


def scalars_of(folder):
    """Return {(tag, step): value} of all event files in a folder; a step that came twice fails."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    read = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    read.Reload()
    found = {}
    for tag in read.Tags()["tensors"]:
        for event in read.Tensors(tag):
            assert (tag, event.step) not in found
            found[tag, event.step] = make_ndarray(event.tensor_proto).item()
    return found


def rows_of(database):
    """Return {(name, step): value} of the metrics in trackio's database, and the ids of the runs."""
    found, runs = {}, set()
    with sqlite3.connect(database) as connection:
        for run, step, metrics in connection.execute("select run_id, step, metrics from metrics"):
            runs.add(run)
            for name, value in json.loads(metrics).items():
                assert (name, step) not in found
                found[name, step] = value
    return found, runs


def numbers_of(events):
    return {(tag, event["step"]): value for event in events for tag, value in tagged(event).items()}


def test_both_hold_the_lines_of_metrics_after_a_run_that_was_broken_off(tmp_path):
    """Two ranks, and a signal in step 6 whose step 5 was logged: what is gone on with is written anew, by rank 0."""
    for name in ("tensorboard", "trackio"):
        pytest.importorskip(name)
    place, stored = make_place(tmp_path), tmp_path / "trackio"
    environ = {"TRACKIO_DIR": str(stored)}
    fault = {"FAULT": "signal_in_window", "FAULT_SIGNAL": "SIGTERM", "FAULT_STEP": "5", "FAULT_MICRO": "1"}
    broken = train_in(place, WANTED, size=2, **environ, **fault)
    assert broken.rank_codes() == [75, 75], broken.output()[-3000:]
    run_dir = place / "runs" / "recipe"
    assert scalars_of(run_dir / "tensorboard") == numbers_of(events_of(run_dir)) != {}
    [database] = stored.glob("*.db")
    before, [first] = rows_of(database)
    assert before == numbers_of(events_of(run_dir))
    ended = train_in(place, WANTED, size=2, **environ)
    assert ended.rank_codes() == [0, 0] and "note: tensorboard" not in ended.output(), ended.output()[-3000:]
    numbers = numbers_of(events_of(run_dir))
    assert max(step for _, step in numbers) == 9 and ("train/tokens_per_second", 9) in numbers
    assert scalars_of(run_dir / "tensorboard") == numbers
    assert len(list((run_dir / "tensorboard").iterdir())) == 1
    after, [second] = rows_of(database)
    assert after == numbers and second != first
    assert "rackio project" not in ended.output()


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    class Failing:
        name = "tensorboard"

        def __init__(self, recipe, folder, began):
            if folder.name == "at once":
                raise OSError("no room")

        def record(self, event):
            raise ValueError("no more")

        def close(self):
            raise AssertionError("left out by then")

    monkeypatch.setattr(trackers, "BUILT", {"tensorboard": Failing})
    assert build_trackers(recipe_with("tensorboard"), tmp_path / "at once", []) == []
    assert "note: tensorboard shows nothing of this run: OSError: no room" in capsys.readouterr().out
    built = build_trackers(recipe_with("tensorboard"), tmp_path, [])
    report = ProgressReport(tmp_path / "metrics.jsonl", trackers=built)
    for step in (1, 2):
        report._record({"step": step, "loss": 1.0, "seconds": 1.0})
    report.close()
    assert capsys.readouterr().out.count("takes no more of this run: ValueError: no more") == 1
    assert len(events_of(tmp_path)) == 2


@pytest.mark.parametrize(
    ("report_to", "ours", "theirs"),
    [
        (None, [], "none"),
        ("none", [], ["none"]),
        ("tensorboard", ["tensorboard"], "none"),
        (["trackio", "tensorboard"], ["tensorboard", "trackio"], "none"),
        (["wandb", "trackio"], ["trackio"], ["wandb"]),
    ],
)
def test_what_the_recipe_names_is_reported_to_once(report_to, ours, theirs):
    assert wanted_trackers(recipe_with(report_to)) == ours
    assert _callbacks(report_to) == theirs


def test_the_loop_by_hand_reports_too():
    check_hand_loop(recipe_with(["tensorboard", "trackio"]))
    with pytest.raises(Refused, match="report_to"):
        check_hand_loop(recipe_with("wandb"))
