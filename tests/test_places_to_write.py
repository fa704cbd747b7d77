"""Where a command may write: links are written through, and what is the system's own is left alone."""

import os
from pathlib import Path

import pytest

from past_run_folders import step, write_run
from tiny_training import build_recipe
from tunebook.commands.cli import main
from tunebook.errors import Refused
from tunebook.export.finished import Finished
from tunebook.merge.target import find_merge_problems, new_folder
from tunebook.runs.report import write_report
from tunebook.system.out_files import check_out, write_out
from tunebook.system.writing import find_fault_of_place, folder_to_fill, write_whole

LINKS = {
    "to_file": "kept/file",
    "to_link": "to_file",
    "to_new": "kept/new",
    "round": "round",
    "to_output": "system/output",
    "to_system": "system",
    "system/output": "../kept/file",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to stand in, with links, and with a folder `system` that stands for /dev."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tunebook.system.writing.SYSTEM_FOLDERS", (str(tmp_path / "system"),))
    for name in ("kept", "system"):
        (tmp_path / name).mkdir()
    (tmp_path / "kept" / "file").write_text("old")
    for name, leads_to in LINKS.items():
        (tmp_path / name).symlink_to(leads_to)
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


BAD = {
    "system/output": "the system's own",
    "system/new": "the system's own",
    "kept/../system/new": "the system's own",
    "to_output": "the system's own",
    "to_system/new": "the system's own",
    "to_system/new/below": "the system's own",
    "round": "in a circle",
    "pipe": "no regular file",
    "x" * 300: "too long",
    f"new/{'x' * 300}/y": "too long",
    "y" * 250: "too long",
    "-": "standard output is not written to",
}


@pytest.mark.parametrize(("out", "reason"), BAD.items(), ids=[name[:20] for name in BAD])
def test_every_command_refuses_a_place_that_is_none(here, out, reason):
    run = write_run(here / "runs" / "mine", [step(1)])
    finished = Finished(run, build_recipe("base", lora={"r": 4}), {"status": "completed"})
    with pytest.raises(Refused, match=reason):
        write_report([str(run)], out)
    with pytest.raises(Refused, match=reason):
        check_out(out, run)
    assert reason in find_merge_problems(finished, Path(out), None)[0].message
    with pytest.raises(OSError, match=reason):
        write_whole(Path(out), "new")
    with pytest.raises(OSError, match=reason), folder_to_fill(Path(out)):
        pass
    assert (here / "kept" / "file").read_text() == "old" and names_in(here / "system") == ["output"]


def test_names_of_the_system_are_known_and_shared_memory_is_an_ordinary_folder(tmp_path):
    for name in ("/dev/stdout", "/dev/fd/1", "/dev/new/x", "/tmp/../dev/x", "/proc/self/fd/1", "/sys/x", "/dev/shm"):
        assert "the system's own" in find_fault_of_place(Path(name)), name
    for name, leads_to in (("null", "/dev/null"), ("devices", "/dev")):
        (tmp_path / name).symlink_to(leads_to)
    for name in ("null", "devices/x"):
        assert "the system's own" in find_fault_of_place(tmp_path / name), name
    for name in ("/dev/shm/x", "/development/x", "x", ".", "..", "/"):
        assert find_fault_of_place(Path(name)) == "", name


@pytest.mark.parametrize(("link", "target"), [("to_file", "file"), ("to_link", "file"), ("to_new", "new")])
def test_what_a_link_leads_to_is_written_and_the_link_stays(here, link, target):
    write_out(check_out(link, here / "run"), "new")
    assert (here / link).is_symlink() and (here / "kept" / target).read_text() == "new"
    assert set(names_in(here / "kept")) == {"file", target}
    (here / "kept" / target).unlink()
    with folder_to_fill(here / link) as folder:
        (folder / "weights").write_text("whole")
    assert (here / link).is_symlink() and (here / "kept" / target / "weights").read_text() == "whole"


@pytest.mark.parametrize("fill", [folder_to_fill, new_folder])
@pytest.mark.parametrize("name", [".", "../standing", "./."])
def test_the_folder_one_stands_in_is_filled_and_stays_the_same(tmp_path, monkeypatch, fill, name):
    place = tmp_path / "standing"
    place.mkdir()
    monkeypatch.chdir(place)
    number = place.stat().st_ino
    with fill(Path(name)) as folder:
        (folder / "weights").write_text("whole")
        (folder / "inner").mkdir()
    assert place.stat().st_ino == number and names_in(Path()) == ["inner", "weights"]
    assert names_in(tmp_path) == ["standing"]


LONG = "x" * 300


@pytest.mark.parametrize(
    "words",
    [
        ("export", LONG),
        ("chat", LONG),
        ("push", LONG, "--repo", "me/x"),
        ("repro", LONG),
        ("report", LONG),
        ("merge", f"{LONG}/y", "--out", "merged"),
        ("generate", f"runs/{LONG}", "--prompts", "x.txt", "--out", "x"),
        ("launch", f"{LONG}.yaml"),
    ],
    ids=lambda words: words[0],
)
def test_what_is_read_may_not_have_such_a_name_either(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["tunebook", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("refused: ")
    assert names_in(tmp_path) == []
