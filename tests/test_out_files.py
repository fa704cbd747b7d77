"""What a command writes for the user: refused before the work where it can't be written, and whole at its end."""

import errno

import pytest

from tunebook.errors import Refused
from tunebook.system.out_files import check_out, write_out


@pytest.fixture
def run(tmp_path):
    (tmp_path / "runs" / "mine" / "adapter").mkdir(parents=True)
    (tmp_path / "prompts.jsonl").write_text("{}\n")
    (tmp_path / "file").write_text("")
    return tmp_path / "runs" / "mine"


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("", "is empty"),
        ("runs", "is a folder"),
        ("prompts.jsonl", "is what is read"),
        ("runs/../prompts.jsonl", "is what is read"),
        ("file/answers.jsonl", "is a file"),
        ("runs/mine/run_summary.json", "the run's own"),
        ("runs/mine/adapter/README.md", "the run's own"),
        ("runs/mine/other.yaml", "the run's own"),
        ("/dev/null", "the system's own"),
    ],
)
def test_a_bad_place_is_refused(run, tmp_path, monkeypatch, out, reason):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refused, match="--out") as refused:
        check_out(out, run, ["prompts.jsonl"])
    assert reason in refused.value.render()


@pytest.mark.parametrize("out", ["new/deep/answers.jsonl", "answers.jsonl", "runs/mine/answers.jsonl", "file"])
def test_other_places_are_written(run, tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    write_out(check_out(out, run, ["prompts.jsonl"]), "whole\n")
    assert (tmp_path / out).read_text() == "whole\n"


def test_a_full_disk_leaves_the_earlier_file(tmp_path, monkeypatch):
    path = tmp_path / "answers.jsonl"
    path.write_text("earlier\n")

    def fail(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tunebook.system.writing.os.fsync", fail)
    with pytest.raises(Refused, match="No space left on device"):
        write_out(path, "new\n")
    assert [one.name for one in tmp_path.iterdir()] == ["answers.jsonl"]
    assert path.read_text() == "earlier\n"
