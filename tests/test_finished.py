"""Finding what came out of a run: its end, or a checkpoint."""

import fcntl
import json

import pytest

from tunebook.errors import Refused
from tunebook.export.finished import open_finished
from tunebook.hub.publishing import check_run
from tunebook.recipe.schema import HubSection
from tunebook.runs.checkpoints import PROGRESS, finish_checkpoint

RECIPE = "model: {name_or_path: base}\nlora: {r: 4}\ndata: {path: gone.jsonl, template: gone.jinja}\n"


def make_run(folder, status="completed", steps=()):
    """Write what a run leaves, with nothing of weight in it."""
    (folder / "adapter").mkdir(parents=True)
    (folder / "x.yaml").write_text(RECIPE)
    (folder / "run_summary.json").write_text(json.dumps({"status": status}))
    if status == "completed":
        (folder / "adapter" / "adapter_model.safetensors").write_text("weights")
    for step in steps:
        beside = folder / "beside"
        beside.mkdir()
        (beside / PROGRESS).write_text("{}")
        (beside / "adapter_model.safetensors").write_text(f"weights of {step}")
        (folder / "checkpoints").mkdir(exist_ok=True)
        finish_checkpoint(beside, folder / "checkpoints" / f"checkpoint-{step}", step)
    return folder


def test_a_folder_without_a_finished_run_is_refused(tmp_path):
    with pytest.raises(Refused, match=r"no run_summary\.json"):
        open_finished(str(tmp_path))
    (tmp_path / "run_summary.json").write_text(json.dumps({"status": "failed"}))
    with pytest.raises(Refused, match="failed"):
        open_finished(str(tmp_path))
    (tmp_path / "run_summary.json").write_text(json.dumps({"status": "completed"}))
    with pytest.raises(Refused, match="0 recipes"):
        open_finished(str(tmp_path))


def test_a_run_is_opened_when_its_data_and_its_base_are_gone(tmp_path):
    finished = open_finished(str(make_run(tmp_path / "x")))
    assert finished.source == finished.adapter == tmp_path / "x" / "adapter"
    assert finished.recipe.data.path == "gone.jsonl" and finished.checkpoint is None


@pytest.mark.parametrize("status", ["completed", "interrupted", "failed", "running"])
def test_a_checkpoint_is_opened_whatever_became_of_the_run(tmp_path, monkeypatch, status):
    run = make_run(tmp_path / "x", status, steps=(4, 12))
    place = run / "checkpoints" / "checkpoint-4"
    finished = open_finished(f"{place}/")
    assert (finished.folder, finished.source, finished.checkpoint.step) == (run, place, 4)
    (tmp_path / "latest").symlink_to(place)
    assert open_finished(str(tmp_path / "latest")).source == place
    monkeypatch.chdir(run / "checkpoints")
    assert open_finished("checkpoint-12").checkpoint.step == 12
    monkeypatch.chdir(place)
    assert open_finished(".").folder == run


def test_what_is_no_source_is_refused_with_what_to_name(tmp_path):
    run = make_run(tmp_path / "x", "interrupted", steps=(4, 12))
    with pytest.raises(Refused, match=r"interrupted.*such as .*checkpoint-12"):
        open_finished(str(run))
    for inside in ("adapter", "checkpoints"):
        with pytest.raises(Refused, match=rf"in {run}: name that"):
            open_finished(str(run / inside))
    with pytest.raises(Refused, match=r"no run_summary\.json"):
        open_finished(str(run / "checkpoints" / "checkpoint-5"))
    (run / "checkpoints" / "checkpoint-4" / "adapter_model.safetensors").write_text("weights of 5")
    with pytest.raises(Refused, match=r"no whole checkpoint: adapter_model\.safetensors has another content"):
        open_finished(str(run / "checkpoints" / "checkpoint-4"))


def test_a_run_that_says_running_is_going_on_or_broke_off(tmp_path):
    run = make_run(tmp_path / "x", "running", steps=(4,))
    with pytest.raises(Refused, match=r"broke off, and left no adapter\. Run its command again.*checkpoint-4"):
        open_finished(str(run))
    with (run / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Refused, match=r"is going on, and has no adapter yet\. Wait for its end.*checkpoint-4"):
            open_finished(str(run))
        with pytest.raises(Refused, match=r"is going on, and has no adapter yet"):
            check_run(run, HubSection(repo="me/x"))


def test_a_run_whose_adapter_was_deleted_is_refused(tmp_path):
    run = make_run(tmp_path / "x", steps=(4,))
    (run / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(Refused, match=r"holds no weights.*checkpoint-4"):
        open_finished(str(run))
