"""Files and folders are whole or absent."""

import os

import pytest

from tunebook.system.writing import (
    delete_folder,
    delete_leftovers,
    folder_beside,
    put_in_place,
    restore_earlier,
    write_whole,
)


def names(folder):
    return [path.name for path in folder.iterdir()]


def test_a_text_is_replaced_whole(tmp_path):
    path = tmp_path / "new" / "file.json"
    write_whole(path, "one")
    write_whole(path, "two")
    assert path.read_text() == "two"
    assert names(path.parent) == ["file.json"]


def test_a_write_that_fails_leaves_the_old_text(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    write_whole(path, "old")

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "new")
    assert path.read_text() == "old"


def test_a_folder_takes_the_place_of_an_earlier_one(tmp_path):
    folder = tmp_path / "adapter"
    for text in ("first", "second"):
        beside = folder_beside(folder)
        assert names(beside) == []
        (beside / text).write_text(text)
        put_in_place(beside, folder)
        assert names(folder) == [text]
    assert names(tmp_path) == ["adapter"]


def test_what_a_broken_writing_left_is_not_taken_over(tmp_path):
    folder = tmp_path / "adapter"
    (folder_beside(folder) / "half").write_text("half")
    beside = folder_beside(folder)
    assert names(beside) == []


def test_who_may_read_the_folder_may_read_what_is_in_it(tmp_path):
    beside = folder_beside(tmp_path / "adapter")
    (beside / "private").write_text("x")
    (beside / "private").chmod(0o600)
    beside.chmod(0o755)
    put_in_place(beside, tmp_path / "adapter")
    assert (tmp_path / "adapter" / "private").stat().st_mode & 0o777 == 0o644


def test_what_was_broken_off_is_cleared_away_and_what_it_was_to_replace_comes_back(tmp_path):
    for name in (".one.writing", ".two.deleting", ".three.earlier", ".four.earlier", "four", ".git"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    restore_earlier(tmp_path)
    assert (tmp_path / "three" / "file").read_text() == ".three.earlier"
    delete_leftovers(tmp_path)
    assert sorted(names(tmp_path)) == [".git", "four", "three"]
    assert (tmp_path / "four" / "file").read_text() == "four"
    delete_leftovers(tmp_path / "nowhere")


def test_a_deleted_folder_leaves_nothing(tmp_path):
    (tmp_path / "old" / "inner").mkdir(parents=True)
    delete_folder(tmp_path / "old")
    assert names(tmp_path) == []
