"""Checkpoint folders are whole or told apart from whole ones, and rotation never takes the last way back."""

import json

import pytest

from tunebook.runs.checkpoints import (
    NotWhole,
    check_whole,
    delete_older,
    find_newest,
    finish_checkpoint,
    list_checkpoints,
)
from tunebook.system.writing import folder_beside


def save(folder, step, content="weights", best=None):
    target = folder / f"checkpoint-{step}"
    beside = folder_beside(target)
    (beside / "adapter.bin").write_text(content)
    (beside / "progress.json").write_text(json.dumps({"best_step": best}))
    return finish_checkpoint(beside, target, step)


def steps(folder):
    return [int(path.name.split("-")[1]) for path in list_checkpoints(folder)]


def test_a_finished_checkpoint_is_whole_and_nothing_is_left_beside(tmp_path):
    saved = save(tmp_path, 7)
    assert check_whole(tmp_path / "checkpoint-7") == saved and saved.step == 7
    manifest = json.loads((saved.folder / "manifest.json").read_text())
    assert manifest["files"]["adapter.bin"]["bytes"] == 7 and len(manifest["files"]["adapter.bin"]["sha256"]) == 64
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-7"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "adapter.bin").write_text("weig"), "adapter.bin has 4 bytes instead of 7"),
        (lambda folder: (folder / "adapter.bin").write_text("Weights"), "adapter.bin has another content"),
        (lambda folder: (folder / "adapter.bin").unlink(), "adapter.bin is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda folder: (folder / "progress.json").unlink(), "progress.json is missing"),
        *(
            (lambda folder, text=text: (folder / "manifest.json").write_text(text), "manifest.json cannot be read")
            for text in ('{"step": 7', '{"step": 7, "files": {"adapter.bin": {}}}', '{"step": 7, "files": []}', "[]")
        ),
        (lambda folder: (folder / "manifest.json").write_text('{"step": 7, "files": {}}'), "manifest.json does not"),
    ],
)
def test_what_is_not_as_saved_is_named_and_the_one_before_it_found(tmp_path, damage, reason):
    before = save(tmp_path, 6)
    damage(save(tmp_path, 7).folder)
    with pytest.raises(NotWhole, match=reason):
        check_whole(tmp_path / "checkpoint-7")
    newest, skipped = find_newest(tmp_path)
    assert newest == before and len(skipped) == 1
    assert skipped[0].startswith(f"checkpoint-7 is skipped: {reason}")


def test_a_checkpoint_whose_best_is_damaged_is_no_way_to_the_best(tmp_path):
    before, best = save(tmp_path, 1), save(tmp_path, 2, best=2)
    newest = save(tmp_path, 3, best=2)
    assert find_newest(tmp_path, needs_best=True) == (newest, ())
    (best.folder / "adapter.bin").write_text("Weights")
    assert find_newest(tmp_path)[0] == newest
    found, skipped = find_newest(tmp_path, needs_best=True)
    assert found == before and "checkpoint-3 is skipped: the best checkpoint is checkpoint-2, and" in skipped[0]


def test_steps_are_numbers_and_an_empty_folder_has_none(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step)
    (tmp_path / "checkpoint-final").mkdir()
    assert find_newest(tmp_path)[0].step == 100 and steps(tmp_path) == [9, 10, 100]
    assert find_newest(tmp_path / "nowhere") == (None, ())


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [(None, None, [1, 2, 3, 4]), (2, None, [3, 4]), (1, None, [4]), (1, 2, [2, 4]), (2, 2, [2, 4]), (3, 1, [1, 3, 4])],
)
def test_rotation_keeps_the_newest_and_the_best(tmp_path, limit, best, kept):
    saved = [save(tmp_path, step) for step in (1, 2, 3, 4)]
    delete_older(saved[-1], limit, best)
    assert steps(tmp_path) == kept


def test_a_damaged_later_checkpoint_is_not_kept_in_place_of_a_whole_one(tmp_path):
    for step in (2, 3):
        save(tmp_path, step)
    (tmp_path / "checkpoint-9").mkdir()  # what a past that could not be resumed left
    delete_older(save(tmp_path, 4), 2, None)
    assert steps(tmp_path) == [3, 4]
