"""The run folder: nothing of an earlier run is lost, nothing is made by a refused start, two runs never share it."""

import errno
import fcntl
import json
import os
from contextlib import ExitStack
from threading import Timer

import pytest

from tunebook.errors import Refused
from tunebook.launching.world import World
from tunebook.plan.plan import build_plan
from tunebook.recipe.reading import load_recipe
from tunebook.runs.folder import check_folder, find_finished, hold_finished, is_unfinished, open_run_folder, read_begun
from tunebook.runs.identity import recipe_identity

IDENTITY = {"training.seed": 42}


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "case.yaml"
    path.write_text("model: {name_or_path: a/b}\ndata: {path: a/b}\n")
    return load_recipe(str(path))


@pytest.fixture
def plan(recipe, tmp_path):
    return build_plan(recipe, World(), run_dir=str(tmp_path / "runs" / "case"))


def finish(folder, status="completed", **more):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run_summary.json").write_text(json.dumps({"status": status, **more}))
    (folder / "adapter").mkdir(exist_ok=True)
    (folder / "adapter" / "adapter_model.safetensors").write_text("weights")


def begin(plan, recipe, status, **begun):
    """Leave an unfinished run that began as `plan` and `recipe` say, but for what is given."""
    with open_run_folder(plan, recipe, {**recipe_identity(recipe, plan), **begun}, keep=False) as folder:
        finish(folder, status)
    return folder


def test_a_new_run_writes_its_recipe_and_plan(plan, recipe, tmp_path):
    with open_run_folder(plan, recipe, IDENTITY, keep=False) as folder:
        assert json.loads((folder / "plan.json").read_text())["run_dir"] == str(folder)
        assert load_recipe(str(folder / "case.yaml")).resolved == recipe.resolved


def test_a_finished_run_is_set_aside_whole(plan, recipe, tmp_path, capsys):
    finish(tmp_path / "runs" / "case", note="keep me")
    with open_run_folder(plan, recipe, IDENTITY, keep=False):
        [aside] = (tmp_path / "runs").glob("case.*")
        assert json.loads((aside / "run_summary.json").read_text())["note"] == "keep me"
        assert f"note: the run that was in {tmp_path}/runs/case is kept in {aside}\n" in capsys.readouterr().err
        assert (aside / "adapter").is_dir()


@pytest.mark.parametrize("status", ["running", "interrupted", "failed"])
def test_an_unfinished_run_of_another_recipe_refuses_unless_fresh(plan, recipe, tmp_path, status):
    begin(plan, recipe, status, **{"training.learning_rate": 0.5, "lora": "given", "lora.r": 4})
    with pytest.raises(Refused) as refused:
        check_folder(plan, recipe, fresh=False)
    report = refused.value.render()
    assert "training.learning_rate: the unfinished run" in report and "began with 0.5, this one has 5e-05" in report
    assert "lora: the unfinished run" in report and "lora.r" not in report, "a section that is gone is said once"
    assert "--fresh" in report
    check_folder(plan, recipe, fresh=True)
    with open_run_folder(plan, recipe, IDENTITY, keep=False):
        assert len(list((tmp_path / "runs").glob("case.*"))) == 1


def test_an_unfinished_run_of_the_same_recipe_is_gone_on_with_in_place(plan, recipe, tmp_path):
    folder = begin(plan, recipe, "interrupted")
    (folder / "checkpoints" / ".checkpoint-7.writing").mkdir(parents=True)
    check_folder(plan, recipe, fresh=False)
    with open_run_folder(plan, recipe, recipe_identity(recipe, plan), keep=True):
        assert not list((tmp_path / "runs").glob("case.*")) and (folder / "adapter").is_dir()
        assert not list((folder / "checkpoints").iterdir()), "what a killed run was writing is no checkpoint"
    assert read_begun(str(folder)).identity == recipe_identity(recipe, plan)


def test_checkpoints_of_an_unknown_recipe_refuse(plan, recipe, tmp_path):
    folder = tmp_path / "runs" / "case"
    finish(folder, "running")
    check_folder(plan, recipe, fresh=False)  # nothing in it is worth keeping
    (folder / "checkpoints" / "checkpoint-3").mkdir(parents=True)
    with pytest.raises(Refused, match="not known"):
        check_folder(plan, recipe, fresh=False)


def test_setting_aside_twice_in_one_second_keeps_both(plan, recipe, tmp_path):
    for _ in range(3):
        finish(tmp_path / "runs" / "case")
        with open_run_folder(plan, recipe, IDENTITY, keep=False):
            pass
    assert len(list((tmp_path / "runs").glob("case.*"))) == 3


def test_two_runs_never_share_a_folder(plan, recipe):
    with open_run_folder(plan, recipe, IDENTITY, keep=False) as folder:
        with pytest.raises(Refused, match="in use"):
            check_folder(plan, recipe, fresh=True)
        with pytest.raises(Refused, match="in use"), open_run_folder(plan, recipe, IDENTITY, keep=False):
            pass
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free again


def test_ranks_that_look_at_once_are_in_nobodys_way(plan, recipe):
    """Each rank of a launch asks whether the folder is free, and `tunebook report` may ask meanwhile."""
    with open_run_folder(plan, recipe, IDENTITY, keep=False) as folder:
        pass
    with (folder / ".lock").open("r") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        check_folder(plan, recipe, fresh=True)
        Timer(0.2, fcntl.flock, (other, fcntl.LOCK_UN)).start()
        with open_run_folder(plan, recipe, IDENTITY, keep=True):
            pass


def test_one_that_is_turned_away_leaves_the_name_of_the_launch_that_holds_the_folder(plan, recipe, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "29500")
    with open_run_folder(plan, recipe, IDENTITY, keep=False) as folder:
        monkeypatch.setattr("tunebook.runs.folder.check_free", lambda folder: None)  # both came at once
        with pytest.raises(Refused, match="in use"), open_run_folder(plan, recipe, IDENTITY, keep=True):
            pass
        assert "29500" in (folder / ".lock").read_text()
    monkeypatch.setenv("MASTER_PORT", "29501")
    with open_run_folder(plan, recipe, IDENTITY, keep=True):
        assert "29501" in (folder / ".lock").read_text() and "29500" not in (folder / ".lock").read_text()


def test_folders_that_are_no_runs_are_left_alone(plan, recipe, tmp_path):
    folder = tmp_path / "runs" / "case"
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(Refused, match="no run"), open_run_folder(plan, recipe, IDENTITY, keep=False):
        pass
    assert (folder / "thesis.tex").read_text() == "years of work"
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="is a file"):
        check_folder(build_plan(recipe, World(), run_dir=str(tmp_path / "file")), recipe, fresh=True)


def test_a_folder_that_cannot_be_made_is_refused_and_leaves_nothing(recipe, tmp_path):
    (tmp_path / "file").write_text("")
    plan = build_plan(recipe, World(), run_dir=str(tmp_path / "file" / "runs"))
    with pytest.raises(Refused, match="--run-dir"), open_run_folder(plan, recipe, IDENTITY, keep=False):
        pass


def test_finished_means_the_same_result_and_that_it_is_there(plan, recipe, tmp_path):
    folder = tmp_path / "runs" / "case"
    with open_run_folder(plan, recipe, IDENTITY, keep=False):
        finish(folder)
    assert find_finished(plan, IDENTITY) == {"status": "completed"}
    assert find_finished(plan, {**IDENTITY, "base model": "another"}) is None
    (folder / "adapter" / "adapter_model.safetensors").unlink()
    assert find_finished(plan, IDENTITY) is None and is_unfinished(folder)
    finish(folder, "failed")
    assert find_finished(plan, IDENTITY) is None


@pytest.mark.parametrize(
    "text", ["", "[]", '{"result": {}, "settings": null}', '{"result": 3, "settings": {}}', "\x00"]
)
def test_a_damaged_identity_is_that_of_no_known_run(plan, tmp_path, text):
    folder = tmp_path / "runs" / "case"
    folder.mkdir(parents=True)
    (folder / "identity.json").write_text(text)
    assert read_begun(plan.run_dir) is None


def test_a_run_that_may_not_be_written_to_is_refused(plan, recipe, tmp_path, monkeypatch):
    finish(tmp_path / "runs" / "case")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(Refused, match="cannot be written to"):
        check_folder(plan, recipe, fresh=False)


def test_a_full_disk_at_the_start_is_refused(plan, recipe, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tunebook.runs.folder.write_whole", full)
    with pytest.raises(Refused, match="No space left on device"), open_run_folder(plan, recipe, IDENTITY, keep=False):
        pass


def test_a_program_that_goes_on_from_nothing_leaves_checkpoints_alone(plan, recipe, tmp_path):
    (begin(plan, recipe, "running") / "checkpoints" / "checkpoint-3").mkdir(parents=True)
    check_folder(plan, recipe, fresh=False)
    with pytest.raises(Refused, match="holds checkpoints"):
        check_folder(plan, recipe, fresh=False, goes_on=False)
    check_folder(plan, recipe, fresh=True, goes_on=False)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_used_with_one_note(plan, recipe, tmp_path, monkeypatch, capsys, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    finish(tmp_path / "runs" / "case", note="keep me")
    monkeypatch.setattr("fcntl.flock", flock)
    for keep in (False, True):
        check_folder(plan, recipe, fresh=True)
        with open_run_folder(plan, recipe, IDENTITY, keep=keep) as folder:
            assert read_begun(str(folder)).identity == IDENTITY
        *others, note = capsys.readouterr().err.splitlines()
        assert ["is kept in" in other for other in others] == ([] if keep else [True])
        assert note.startswith(f"note: {folder} is on a disk without file locks ({os.strerror(number)})")
        assert "no second run may use it" in note
    assert len(list((tmp_path / "runs").glob("case.*"))) == 1


def refuse_opening(monkeypatch, error):
    def opened(path, *_, **__):
        raise error

    monkeypatch.setattr("pathlib.Path.open", opened)


def test_a_lock_that_may_not_be_read_is_refused_with_what_to_do(plan, recipe, monkeypatch):
    begin(plan, recipe, "completed")
    with monkeypatch.context() as patch, pytest.raises(Refused, match=r"Permission denied.*--run-dir"):
        refuse_opening(patch, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
        check_folder(plan, recipe, fresh=True)


def test_a_folder_that_another_launch_renames_at_this_moment_is_free(plan, recipe, monkeypatch):
    folder = begin(plan, recipe, "completed")
    with monkeypatch.context() as patch:
        refuse_opening(patch, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
        check_folder(plan, recipe, fresh=True)
    real = type(folder).iterdir
    looks = iter([real(folder)])  # there for the first look, gone with the second

    def iterdir(path):
        for look in looks:
            return look
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr("pathlib.Path.iterdir", iterdir)
    check_folder(plan, recipe, fresh=False)


def test_of_two_fresh_launches_that_found_the_folder_free_one_is_turned_away(plan, recipe, tmp_path, monkeypatch):
    finish(tmp_path / "runs" / "case")
    monkeypatch.setattr("tunebook.runs.folder.check_free", lambda folder: None)  # both looked before either began
    with open_run_folder(plan, recipe, IDENTITY, keep=False) as folder:
        with pytest.raises(Refused, match="in use"), open_run_folder(plan, recipe, {"seed": 1}, keep=False):
            pass
        assert read_begun(str(folder)).identity == IDENTITY
        assert len(list((tmp_path / "runs").glob("case.*"))) == 1, "the first one's folder stays where it is"


def test_a_launch_that_waited_for_a_folder_set_aside_meanwhile_does_not_take_it(plan, recipe, tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "case"
    finish(folder)
    monkeypatch.setattr("tunebook.runs.folder.check_free", lambda folder: None)
    first = ExitStack()
    with (folder / ".lock").open("a") as old:
        fcntl.flock(old, fcntl.LOCK_EX)

        def set_aside():  # as the first launch does, which holds the old lock until it holds the new one
            folder.rename(tmp_path / "runs" / "case.old")
            first.enter_context(open_run_folder(plan, recipe, IDENTITY, keep=False))
            fcntl.flock(old, fcntl.LOCK_UN)

        Timer(0.2, set_aside).start()
        with pytest.raises(Refused, match="in use"), open_run_folder(plan, recipe, {"seed": 1}, keep=False):
            pass
    with first:
        assert read_begun(str(folder)).identity == IDENTITY
        assert not (tmp_path / "runs" / "case.old" / "plan.json").exists(), "the old run is not written into"
    with open_run_folder(plan, recipe, {"seed": 1}, keep=False):
        pass


def test_a_run_that_is_gone_is_not_gone_on_with(plan, recipe):
    with pytest.raises(Refused, match="set aside by another launch"):
        open_run_folder(plan, recipe, IDENTITY, keep=True).__enter__()


def test_what_was_set_aside_is_held_no_longer_than_needed(plan, recipe, tmp_path):
    begin(plan, recipe, "completed")
    with open_run_folder(plan, recipe, IDENTITY, keep=False):
        [aside] = (tmp_path / "runs").glob("case.*")
        with hold_finished(aside):
            pass
