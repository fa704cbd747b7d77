"""What a merge refuses before anything loads."""

import json
import os
import sys
from types import SimpleNamespace

import pytest

from tiny_training import build_recipe
from tunebook.errors import Refused
from tunebook.export.finished import Finished
from tunebook.merge.merge import merge
from tunebook.merge.target import check_room, find_merge_problems, new_folder


def finished_in(tmp_path, lora=True):
    run = tmp_path / "runs" / "tiny"
    (run / "adapter").mkdir(parents=True)
    (run / "adapter" / "adapter_config.json").write_text("{}")
    (run / "checkpoints" / "checkpoint-4").mkdir(parents=True)
    recipe = build_recipe("base", lora={"r": 4} if lora else None)
    return Finished(run, recipe, {"status": "completed"})


def message_of(finished, target, dtype=None):
    return " ".join(problem.render() for problem in find_merge_problems(finished, target, dtype))


@pytest.mark.parametrize("dtype", ["nf4", "int4", "4bit", "fp4", "int8", "8-bit", "NF4", "float8_e4m3fn"])
def test_a_merge_into_quantised_weights_is_refused_with_the_reason(tmp_path, dtype):
    message = message_of(finished_in(tmp_path), tmp_path / "out", dtype)
    assert "never merged into quantised weights" in message and "rounded" in message and dtype in message


@pytest.mark.parametrize(("dtype", "fix"), [("bf16", "Use bfloat16"), ("fp32", "Use float32"), ("double", "one of")])
def test_another_type_is_refused_with_the_right_one(tmp_path, dtype, fix):
    assert fix in message_of(finished_in(tmp_path), tmp_path / "out", dtype)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16", "float32"])
def test_a_new_or_empty_folder_in_a_right_type_is_fine(tmp_path, dtype):
    finished = finished_in(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new", "new/below", "runs/tiny-merged"):
        assert message_of(finished, tmp_path / name, dtype) == ""


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("runs/tiny/adapter", "is the folder of an adapter"),
        ("runs/tiny/adapter/merged", "lies in the folder of an adapter"),
        ("runs/other/../tiny/adapter", "is the folder of an adapter"),
        ("runs/tiny", "lies in the run folder"),
        ("runs/tiny/merged", "lies in the run folder"),
        ("runs/other/m", "lies in the run folder"),
        ("base", "lies in the folder of the base"),
        ("base/m", "lies in the folder of the base"),
        ("runs/tiny/checkpoints", "lies in the run folder"),
        ("runs/tiny/checkpoints/merged", "lies in the run folder"),
        ("full", "is not empty"),
        ("file", "is a file"),
        ("link", "leads nowhere"),
        ("elsewhere", "is the folder of an adapter"),
    ],
)
def test_a_target_that_is_something_else_is_refused(tmp_path, monkeypatch, place, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    finished = finished_in(tmp_path)
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "runs" / "other" / "run_summary.json").write_text("{}")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "elsewhere").symlink_to(finished.adapter)
    assert reason in message_of(finished, tmp_path / place)


def test_a_run_without_adapter_is_refused_with_what_to_use(tmp_path):
    message = message_of(finished_in(tmp_path, lora=False), tmp_path / "out")
    assert "nothing to merge" in message and "runs/tiny/adapter, which is the whole model" in message


def test_all_is_told_together_and_nothing_is_imported_for_it(tmp_path, monkeypatch):
    finished = finished_in(tmp_path, lora=False)
    monkeypatch.setattr("tunebook.merge.merge.open_finished", lambda *given: finished)
    had_torch = "torch" in sys.modules
    with pytest.raises(Refused, match="3 problems"):
        merge("runs/tiny", str(finished.adapter), "nf4")
    assert ("torch" in sys.modules) == had_torch


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    (tmp_path / "adapter").mkdir()
    with pytest.raises(Refused, match="no run"):
        merge(str(tmp_path), str(tmp_path / "out"))
    (tmp_path / "run_summary.json").write_text(json.dumps({"status": "interrupted"}))
    with pytest.raises(Refused, match="left no adapter"):
        merge(str(tmp_path), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_disk_without_room_is_refused(tmp_path):
    check_room(tmp_path / "new" / "below", 1000)
    with pytest.raises(Refused, match="GiB are needed"):
        check_room(tmp_path / "new" / "below", 2**60)


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0 bytes"),
        (900, "900 bytes"),
        (3 * 2**19, "1.50 MiB"),
        (2**20 - 1, "1,024.00 KiB"),
        (5 * 2**31, "10.00 GiB"),
    ],
)
def test_what_is_needed_is_said_in_a_unit_that_shows_it(tmp_path, monkeypatch, number, shown):
    monkeypatch.setattr("tunebook.merge.target.shutil.disk_usage", lambda place: SimpleNamespace(free=number))
    with pytest.raises(Refused, match=f"2,048.00 GiB are needed there while it is made, and {shown} are free"):
        check_room(tmp_path / "new", 2**41)


def test_after_an_error_nothing_is_left_of_the_folder_or_its_parents(tmp_path):
    (tmp_path / "kept").mkdir()
    with pytest.raises(OSError, match="full"), new_folder(tmp_path / "kept" / "a" / "b") as folder:
        (folder / "weights").write_text("half")
        raise OSError("full")
    assert [path.name for path in tmp_path.rglob("*")] == ["kept"]
    with new_folder(tmp_path / "kept" / "a" / "b") as folder:
        (folder / "weights").write_text("whole")
    assert (tmp_path / "kept" / "a" / "b" / "weights").read_text() == "whole"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(Refused, match="cannot be written"), new_folder(tmp_path / "out"):
        pass


def test_a_parent_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(Refused, match="cannot be written"), new_folder(tmp_path / "file" / "out"):
        pass
