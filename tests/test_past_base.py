"""The base of a past run: the one it was trained on is taken, wherever it lies; another one, or a stranger's, never."""

import json
import sys

import pytest

from tunebook.commands import cli
from tunebook.errors import Refused
from tunebook.export.finished import open_finished
from tunebook.export.past_base import base_stops, check_base, has_its_base, lost_data
from tunebook.runs.folder import read_summary
from tunebook.runs.identity import folder_digest

WORDS = {
    "chat": [],
    "generate": ["--prompts", "prompts.txt", "--out", "answers.jsonl"],
    "eval": ["--answer-rows", "0"],
    "merge": ["--out", "merged"],
}


def make_base(folder, weights="weights", **config):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7, **config}))
    (folder / "model.safetensors").write_text(weights)
    return folder


def make_run(place, base="models/base", told=None, **summary):
    """Write a run as its identity, recipe and summary tell of it, and return its folder."""
    run = place / "runs" / "x"
    (run / "adapter").mkdir(parents=True)
    (run / "adapter" / "adapter_model.safetensors").write_text("weights")
    (run / "x.yaml").write_text(
        f"model: {{name_or_path: {base}}}\nlora: {{r: 4}}\ndata: {{path: data/rows, validation: 0.1}}\n"
    )
    said = {"status": "completed", "model": base, "model_revision": None, "public_base": None, "hub_datasets": []}
    (run / "run_summary.json").write_text(json.dumps(said | summary))
    told = told or folder_digest(str(place / base))
    (run / "identity.json").write_text(json.dumps({"result": {"base model": told}, "settings": {}}))
    return run


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where a run was trained on models/base; beside it `else`, the current folder, with another base of that name."""
    make_base(tmp_path / "there" / "models" / "base")
    make_run(tmp_path / "there")
    make_base(tmp_path / "else" / "models" / "base", "other weights")
    (tmp_path / "else" / "prompts.txt").write_text("hello\n")
    monkeypatch.chdir(tmp_path / "else")
    monkeypatch.setattr("socket.create_connection", forbidden)
    return tmp_path


def forbidden(*args, **options):
    raise AssertionError("the network was asked")


def refusal(run, base=None):
    with pytest.raises(Refused) as refused:
        check_base(open_finished(str(run), base))
    return str(refused.value)


def run_command(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["tunebook", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize("command", WORDS)
def test_another_base_of_the_same_name_is_refused_by_every_command(place, monkeypatch, capsys, command):
    code, said = run_command(monkeypatch, capsys, command, place / "there" / "runs" / "x", *WORDS[command])
    hashes = [folder_digest(str(place / one / "models" / "base"))[:12] for one in ("else", "there")]
    assert code == 2 and f"another base than the run was trained on: {hashes[0]} here, {hashes[1]} there" in said
    assert f"--base {place}/there/models/base" in said and said.count("\n") == 1


@pytest.mark.parametrize("command", WORDS)
def test_the_hub_is_not_asked_for_what_was_a_folder(place, monkeypatch, capsys, command):
    (place / "else" / "models").rename(place / "gone")
    code, said = run_command(monkeypatch, capsys, command, place / "there" / "runs" / "x", *WORDS[command])
    assert code == 2 and "models/base was a folder" in said and f"--base {place}/there/models/base" in said


def test_the_right_base_is_taken_wherever_it_is(place, monkeypatch):
    run = place / "there" / "runs" / "x"
    finished = open_finished(str(run), str(place / "there" / "models" / "base"))
    check_base(finished)
    assert finished.recipe.model.name_or_path == str(place / "there" / "models" / "base")
    monkeypatch.chdir(place / "there")
    check_base(open_finished("runs/x"))
    make_base(place / "moved")
    check_base(open_finished("runs/x", str(place / "moved")))
    assert has_its_base(open_finished("runs/x")) and base_stops(open_finished("runs/x")) == {7}
    # Changed in place it is another one.
    (place / "there" / "models" / "base" / "model.safetensors").write_text("trained on")
    assert "another base" in refusal("runs/x") and base_stops(open_finished("runs/x")) is None


@pytest.mark.parametrize("base", ["none", "models", "models/base/config.json", "owner/name"])
def test_what_is_no_base_is_refused_with_the_option(place, base):
    said = refusal(place / "there" / "runs" / "x", base)
    assert said.startswith("refused: --base: ") and "--base " in said.removeprefix("refused: --base: ")


def test_a_run_without_identity_tells_by_its_summary_that_it_was_a_folder(place):
    run = place / "there" / "runs" / "x"
    (run / "identity.json").unlink()
    check_base(open_finished(str(run)))  # which one it was is not known
    (place / "else" / "models").rename(place / "gone")
    assert "was a folder" in refusal(run)


def test_a_base_of_the_hub_is_that_of_its_commit_and_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path, "owner/tiny", "owner/tiny@abc", model_revision="abc", public_base="owner/tiny")
    finished = open_finished(str(run))
    check_base(finished)
    assert finished.recipe.model.revision == "abc"
    make_base(tmp_path / "owner" / "tiny")
    assert "owner/tiny is a folder here, and the run was trained on owner/tiny@abc of the Hub" in refusal(run)
    make_base(tmp_path / "elsewhere")
    assert "Leave --base out" in refusal(run, "elsewhere")


def test_rows_that_were_files_are_not_asked_of_the_hub_either(place):
    finished = open_finished(str(place / "there" / "runs" / "x"))
    assert lost_data(finished) == ["data/rows"]
    (place / "else" / "data" / "rows").mkdir(parents=True)
    assert lost_data(finished) == []
    summary = finished.folder / "run_summary.json"
    summary.write_text(json.dumps({**read_summary(finished.folder), "hub_datasets": ["data/rows"]}))
    (place / "else" / "data").rename(place / "data")
    assert lost_data(open_finished(str(finished.folder))) == []
