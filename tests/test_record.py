"""run_summary.json says who hung, whichever thread writes last."""

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from tunebook.errors import TrainingFailed
from tunebook.launching.world import World

pytestmark = pytest.mark.slow


@pytest.fixture
def record(tmp_path, monkeypatch):
    """The record of a run that has begun, with nothing of weight in it, and what the watchdog is to call."""
    from tunebook.training import outcome
    from tunebook.training.summary import RunSummary

    begun = RunSummary(**{field.name: None for field in fields(RunSummary)})
    monkeypatch.setattr(outcome, "start_summary", lambda *given: begun)
    monkeypatch.setattr(outcome, "PeakMemory", lambda device: SimpleNamespace(stop=lambda: None))
    monkeypatch.setattr(outcome.Record, "_begin_report", lambda *given: None)
    plan, wall = SimpleNamespace(run_dir=str(tmp_path)), SimpleNamespace(seconds=2.5)
    parts = {"recipe": None, "data": None, "model": None}
    called = []
    monkeypatch.setattr(outcome, "set_last_words", called.append)
    return outcome.Record(SimpleNamespace(world=World(), plan=plan, wall=wall, **parts)), called, tmp_path


TRAINER = SimpleNamespace(state=SimpleNamespace(global_step=5))


def error_of(folder: Path):
    return json.loads((folder / "run_summary.json").read_text())["error"]


@pytest.mark.parametrize("first", ["watchdog", "main thread"])
def test_the_rank_that_hangs_stays_named_when_the_main_thread_fails_in_the_same_moment(record, first):
    made, called, folder = record
    with pytest.raises(TrainingFailed), made.kept(TRAINER):
        [last_words] = called
        if first == "watchdog":
            last_words("rank 1 on here hangs")
        raise TrainingFailed("nothing came from the other ranks")
    if first == "main thread":
        assert "nothing came" in error_of(folder)
        last_words("rank 1 on here hangs")
    assert "rank 1 on here hangs" in error_of(folder)
