"""What of a run would go to the Hub, and what keeps it from going."""

import json
import socket
from pathlib import Path

import pytest

from tunebook.errors import Refused
from tunebook.hub.client import cleaned
from tunebook.hub.files import HubFile, find_leaks, list_files, render_public_recipe
from tunebook.hub.publishing import check_run, publish_by_hand
from tunebook.hub.push import why_not_writable
from tunebook.recipe.schema import HubSection

RECIPE = "model:\n  name_or_path: org/tiny\nlora: {}\ndata:\n  path: /some/where/rows.jsonl\n"
HUB = HubSection(repo="me/run")


@pytest.fixture
def run(tmp_path):
    """A finished run's folder with all that pushing looks at."""
    adapter = tmp_path / "runs" / "mine" / "adapter"
    adapter.mkdir(parents=True)
    header = json.dumps({"__metadata__": {"format": "pt"}}).encode()
    (adapter / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 64)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/tiny"}))
    (adapter.parent / "mine.yaml").write_text(RECIPE)
    write_summary(adapter.parent)
    return adapter.parent


def write_summary(folder, **changes):
    (folder / "run_summary.json").write_text(
        json.dumps({"status": "completed", "model_revision": "abc", "exit_code": 0, **changes})
    )


def refusal(run, hub=HUB):
    with pytest.raises(Refused) as refused:
        check_run(run, hub)
    return str(refused.value)


def test_adapter_and_recipe_go_and_nothing_else(run):
    (run / "adapter" / "optimizer.pt").write_text("x")
    (run / "adapter" / ".env").write_text("x")
    (run / "adapter" / ".cache").mkdir()
    (run / "adapter" / ".cache" / "x.json").write_text("{}")
    (run / "checkpoints" / "checkpoint-2").mkdir(parents=True)
    (run / "checkpoints" / "checkpoint-2" / "adapter_model.safetensors").write_text("x")
    (run / "README.md").write_text("the run's card")
    (run / "loss.png").write_bytes(b"\x89PNG")
    names = [file.name for file in check_run(run, HUB)]
    assert names == ["README.md", "adapter_config.json", "adapter_model.safetensors", "loss.png", "mine.yaml"]
    (run / "adapter" / "README.md").write_text("the adapter's card")
    [card] = [file for file in list_files(run) if file.name == "README.md"]
    assert card.content == run / "adapter" / "README.md"


def test_the_published_recipe_names_the_base_and_no_place():
    values = {
        "model": {"name_or_path": "/models/tiny", "base_id": "org/tiny"},
        "data": {"sources": [{"path": "~/rows.jsonl"}, {"path": "../up/more.jsonl"}, {"path": "data/x.jsonl"}]},
        "hub": {"repo": "me/run"},
    }
    text = render_public_recipe(values)
    assert "name_or_path: org/tiny" in text and "me/run" not in text and "base_id" not in text
    for path in ("path: rows.jsonl", "path: more.jsonl", "path: data/x.jsonl"):
        assert path in text


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("adapter_config.json", '{"base_model_name_or_path": "/models/tiny"}', "a path of this machine"),
        ("README.md", "trained in HERE/runs", "a path of this machine"),
        ("README.md", f"see {Path.home()}/x", "a path of this machine"),
        ("README.md", "token: hf_abcdefghijklmnopqrstuvwxyz", "a secret"),
        ("tokenizer_config.json", '{"key": "my own token 123"}', "a secret"),
        ("README.md", "-----BEGIN RSA PRIVATE KEY-----", "a secret"),
    ],
)
def test_secrets_and_paths_are_found_and_not_shown(tmp_path, monkeypatch, name, content, what):
    monkeypatch.chdir(tmp_path)
    content = f"first\n{content.replace('HERE', str(tmp_path))}"
    [problem] = find_leaks([HubFile(name, content.encode())], tmp_path, "my own token 123")
    assert what in problem.message and problem.where.startswith(name)
    assert "abcdefghij" not in problem.render() and "my own token" not in problem.render()


def test_the_name_of_the_machine_is_found_where_it_tells(tmp_path, monkeypatch):
    files = [HubFile("README.md", b"trained on node-17.lab and a gpu")]
    for name, found in (("node-17.lab", 1), ("gpu", 0), ("node-1", 0)):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        assert len(find_leaks(files, tmp_path, None)) == found


def test_ordinary_files_tell_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node-17")
    card = b"https://huggingface.co/org/tiny/tree/main, `/etc/hosts`, 1/2, and/or, s3://bucket/home/x, hf_xet, sk-learn"
    vocabulary = b'{"vocab": {"/home": 1, "/usr/": 2, "/tmp": 3, "hf_": 4}}'
    files = [HubFile("README.md", card), HubFile("tokenizer.json", vocabulary), HubFile("x.yaml", b"path: data/x")]
    assert not find_leaks(files, tmp_path, None)


def test_weights_are_searched_in_their_header_alone(tmp_path):
    header = json.dumps({"__metadata__": {"from": str(tmp_path / "x")}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"hf_abcdefghijklmnopqrstuvwxyz")
    [problem] = find_leaks([HubFile("model.safetensors", file)], tmp_path, None)
    assert "a path of this machine" in problem.message


def test_what_is_no_finished_run_is_refused(run, tmp_path):
    assert "no run_summary.json" in refusal(tmp_path / "absent")
    assert "no run_summary.json" in refusal(run / "checkpoints")
    write_summary(run, status="failed")
    assert "the run is failed" in refusal(run)
    write_summary(run)
    (run / "mine.yaml").write_text("model: [")
    assert "cannot be read as YAML" in refusal(run)
    (run / "mine.yaml").write_text(RECIPE)
    assert "--repo: 'run'" in refusal(run, HubSection(repo="run"))
    assert "--revision" in refusal(run, HubSection(repo="me/run", revision="a..b"))
    (run / "adapter" / "adapter_model.safetensors").unlink()
    assert "no adapter there" in refusal(run)


# X03
def test_a_base_without_a_public_name_is_refused(run):
    write_summary(run, model_revision=None)
    assert "model.base_id: the base was loaded from the folder org/tiny" in refusal(run)
    recipe = run / "mine.yaml"
    recipe.write_text(RECIPE.replace("org/tiny", "/models/tiny\n  base_id: org/small"))
    assert "the base is called org/tiny there, and org/small in the recipe" in refusal(run)
    recipe.write_text(RECIPE.replace("org/tiny", "/models/tiny\n  base_id: org/tiny"))
    assert check_run(run, HUB)


def test_the_command_line_goes_before_the_recipe(run, capsys):
    with pytest.raises(Refused, match="--repo: is missing"):
        publish_by_hand(str(run), None, False, None, True)
    with pytest.raises(Refused, match="--repo: is missing"):
        publish_by_hand(str(run), "", False, "", True)
    (run / "mine.yaml").write_text(RECIPE + "hub: {repo: me/kept, private: true, revision: v1}\n")
    for repo, private, said in (
        (None, False, "me/kept (private, branch v1)"),
        ("me/kept", False, "me/kept (private, branch v1)"),
        ("me/other", False, "me/other (public)"),
        ("me/other", True, "me/other (private)"),
    ):
        publish_by_hand(str(run), repo, private, None, True)
        assert f"{said} would get:" in capsys.readouterr().out
    assert json.loads((run / "run_summary.json").read_text())["exit_code"] == 0


@pytest.mark.parametrize(
    ("repo", "role", "reason"),
    [
        ("me/x", "write", ""),
        ("Me/x", "write", ""),
        ("team/x", "write", ""),
        ("other/x", "fineGrained", ""),
        ("me/x", "read", "the token may only read"),
        ("other/x", "write", "does not belong to other"),
        ("seen/x", "write", "me may only read in seen"),
    ],
)
def test_who_may_write_where(repo, role, reason):
    orgs = [{"name": "team", "roleInOrg": "contributor"}, {"name": "seen", "roleInOrg": "read"}]
    user = {"name": "me", "orgs": orgs, "auth": {"accessToken": {"role": role}}}
    assert (reason in why_not_writable(user, repo)) and bool(why_not_writable(user, repo)) == bool(reason)


def test_what_others_say_is_told_without_tokens_and_signatures(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "not-in-the-usual-form")
    said = "no\n https://me:secret@storage.example/x?signature=1 not-in-the-usual-form hf_abcdefgh " + "x" * 300
    told = cleaned(said)
    assert told.startswith("no https://storage.example/x *** hf_*** xxx") and len(told) == 200


def test_links_are_refused_by_name_and_not_followed(run, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x.txt").write_text("mine")
    (run / "adapter" / "passwd.txt").symlink_to("/etc/passwd")
    (run / "adapter" / "inner").symlink_to(tmp_path / "outside")
    (run / "adapter" / ".hidden").symlink_to("/etc/passwd")
    (run / "loss.png").symlink_to("/etc/passwd")
    said = refusal(run)
    assert "3 problems" in said and "is a link" in said
    assert all(name in said for name in ("adapter/passwd.txt", "adapter/inner", "loss.png"))
