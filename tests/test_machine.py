"""What a result says of where it came about: the commit where there is one, and no place of this machine."""

import json
import subprocess
import sys

import pytest

from checkout import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from machine import find_commit, where_and_when, without_place


def git(folder, *words):
    named = ["-c", "user.name=tester", "-c", "user.email=tester@example.org"]
    ended = subprocess.run(["git", "-C", folder, *named, *words], capture_output=True, text=True, check=True)
    return ended.stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "one.json").write_text("1")
    (tmp_path / "program.py").write_text("1")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--no-verify", "--message", "all")
    return tmp_path


def test_a_checkout_has_its_commit_and_says_whether_it_was_changed(checkout):
    commit = git(checkout, "rev-parse", "HEAD")
    assert find_commit(checkout) == (commit, False)
    (checkout / "benchmarks" / "results" / "one.json").write_text("2")
    assert find_commit(checkout) == (commit, False), "an earlier result changes nothing that is measured"
    (checkout / "program.py").write_text("2")
    assert find_commit(checkout) == (commit, True)


def test_a_folder_that_is_no_checkout_has_no_commit(checkout, tmp_path_factory, monkeypatch):
    assert find_commit(checkout / "benchmarks") is None, "it lies inside of another checkout"
    assert find_commit(tmp_path_factory.mktemp("unpacked")) is None
    monkeypatch.setenv("GIT_DIR", str(checkout / ".git"))
    assert find_commit(tmp_path_factory.mktemp("in_a_hook")) is None
    monkeypatch.setenv("PATH", "")
    assert find_commit(checkout) is None, "git is not installed"


def test_a_command_shows_no_place_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT / "benchmarks")
    rows, shared = tmp_path / "rows.json", ROOT.parent / "shared" / "rows.json"
    words = ["start_time.py", "--rows", str(rows), f"--rows={rows}", str(shared), "results/here.json", "--rounds", "5"]
    shown = ["benchmarks/start_time.py", "--rows", "rows.json", "--rows=rows.json", "../shared/rows.json"]
    assert [without_place(word) for word in words] == [*shown, "benchmarks/results/here.json", "--rounds", "5"]
    monkeypatch.setattr(sys, "argv", words)
    said = json.dumps(where_and_when())
    assert str(ROOT) not in said and str(tmp_path) not in said and "python benchmarks/start_time.py" in said


def test_packages_that_are_missing_are_left_out():
    found = where_and_when(["pytest", "not-to-be-had"])
    assert found["versions"].keys() >= {"python", "torch", "bitsandbytes", "pytest"}
    assert "not-to-be-had" not in found["versions"]
    assert set(found["machine"]) == {"cpu", "cores", "load_average"}
