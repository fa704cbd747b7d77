"""What becomes of a push by the real client when the Hub fails in every way it can: a loopback one, on purpose."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from finished_runs import finished_place
from hub_scenarios import LFS, XET, XET_SMALL
from hub_server import TOKEN
from launched_ranks import clean_environ

pytestmark = [pytest.mark.slow, pytest.mark.long]  # minutes in all: in `make test-slow`
CARD = "---\nbase_model: org/tiny\nlibrary_name: peft\n---\nA card.\n"
# Each ends with exit code 3 and one line that says this.
UNPUBLISHED = {
    "create 401": "the Hub does not accept the token",
    "create 403": "the token may not write there",
    "create 409, busy for ever": "another change of the repository is going on",
    "create 500 for ever": "the Hub answers with an error of its own, 500",
    "create hangs": "the Hub did not answer in time",
    "create drips": "the Hub does not answer",
    "preupload 429, wait 3600": "asked too often; it asks to wait 3,600 seconds",
    "preupload 429, window 3600": "asked too often; it asks to wait 3,600 seconds",
    "preupload 503 with a date": "503; it asks to wait",
    "preupload 403, full": "the Hub has no room left for it (Private repository storage limit reached",
    "batch 500 for ever": "the Hub answers with an error of its own, 500",
    "batch, full": "the Hub has no room left for it",
    "upload cut for ever": "the connection broke off",
    "upload hangs": "the Hub does not answer",
    "upload 403": "the token may not write there (expired)",
    "upload 507": "the Hub has no room left for it",
    "commit 400": "the Hub does not take it (no: https://storage.example/x Bearer ***)",
    "commit 401": "the Hub does not accept the token",
    "commit 402": "the Hub has no room left for it",
    "commit 403": "the token may not write there",
    "commit 409 for ever": "another change of the repository is going on",
    "commit 500 for ever": "the Hub answers with an error of its own, 500",
    "commit hangs": "the Hub did not answer in time",
    "the Hub lost a file": "the Hub does not have README.md, adapter_config.json, adapter_model.safetensors",
    "a token of other letters": "the token holds letters that no token has",
    "a token that is unknown": "the Hub does not accept the token",
    "no token": "there is no token of the Hub on this machine. Log in by `hf auth login`",
    "offline": "HF_HUB_OFFLINE is set",
    "nothing listens": "the Hub can't be reached",
    "no such host": "the Hub can't be reached",
    "private on the public one": "me/run is public, and the run is to be private; nothing was pushed",
}
UNPUBLISHED_XET = {
    "create 403": "the token may not write there",
    "preupload 500 for ever": "the Hub answers with an error of its own, 500",
    "preupload 403, full": "the Hub has no room left for it",
    "token 401": "the Hub does not accept the token",
    "token 403": "the token may not write there",
    "token 500": "the Hub answers with an error of its own, 500",
    "token cut": "the storage of the Hub can't be reached",
    "storage away": "the storage of the Hub can't be reached",
    "storage 500": "the Hub answers with an error of its own, 500",
    "storage hangs": "the Hub does not answer",
    "storage 403": "the token may not write there",
    "commit 401": "the Hub does not accept the token",
    "commit 403": "the token may not write there",
    "commit 500 for ever": "the Hub answers with an error of its own, 500",
}


FILES = (
    "README.md", "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "generation_config.json",
    "loss.png", "tokenizer.json", "tokenizer_config.json",
)  # fmt: skip


def publishable(folder: Path) -> Path:
    """Return a copy of the finished run's place whose base has a public name, with a card and a stray file."""
    shutil.copytree(finished_place(), folder)
    run = folder / "runs" / "recipe"
    recipe, settings = run / "recipe.yaml", run / "adapter" / "adapter_config.json"
    recipe.write_text(recipe.read_text().replace("name_or_path: base\n", "name_or_path: base\n  base_id: org/tiny\n"))
    settings.write_text(settings.read_text().replace('"base"', '"org/tiny"'))
    (run / "adapter" / "README.md").write_text(CARD)
    (run / "adapter" / "optimizer.pt").write_text("not for others")
    return folder


def start(kind: str, folder: Path) -> tuple[subprocess.Popen, Path]:
    place, out = publishable(folder / kind), folder / f"{kind}.json"
    script = [sys.executable, str(Path(__file__).with_name("hub_scenarios.py")), str(place), str(out), kind]
    environ = clean_environ() | {"HF_HOME": str(folder / "home"), "HF_XET_LOG_DEST": str(folder / "xet.log")}
    return subprocess.Popen(script, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True), out


def finish(started: tuple[subprocess.Popen, Path], seconds: float = 180) -> dict:
    process, out = started
    printed, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, printed
    assert not printed, "nothing but the product's own lines, which the scenarios catch"
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """All sets at once: they mostly wait."""
    folder = tmp_path_factory.mktemp("hub")
    started = {kind: start(kind, folder) for kind in ("lfs", "waits", "xet")}
    done = {kind: finish(one) for kind, one in started.items()}
    problems = done["lfs"]["problems"] + done["waits"]["problems"]
    return {"lfs": done["waits"] | done["lfs"] | {"problems": problems}, "xet": done["xet"]}


def every(told: dict) -> list[tuple[str, dict]]:
    return [(name, one) for kind in told for name, one in told[kind].items() if name != "problems"]


def test_a_push_is_one_commit_and_a_second_one_none(told):
    first, again = told["lfs"]["first"], told["lfs"]["again"]
    assert first["text"].startswith("published: http://127.0.0.1:") and "/me/run  (commit " in first["text"]
    assert again["text"].startswith("there already: ")
    assert (first["num_commits"], again["num_commits"], again["num_uploads"]) == (1, 1, 0)
    assert tuple(first["same"]) == FILES
    assert "name_or_path: org/tiny" in first["recipe"] and "base_id" not in first["recipe"]
    assert (first["summary"]["status"], first["summary"]["exit_code"]) == ("completed", 0)
    assert first["summary"]["published"].endswith("/me/run") and first["summary"]["publish_error"] is None


def test_private_repositories_branches_and_parts(told):
    assert told["lfs"]["private"]["private"] and not told["lfs"]["first"]["private"]
    assert "/team/run/tree/v1/a  (commit" in told["lfs"]["branch"]["text"]
    assert told["lfs"]["branch again"]["num_commits"] == told["lfs"]["branch"]["num_commits"] == 1
    # Two files are large enough for LFS, or no text: the weights and the picture, each in two parts.
    assert told["lfs"]["in parts"]["num_uploads"] == 4 and len(told["lfs"]["in parts"]["same"]) == len(FILES)


@pytest.mark.parametrize("name", sorted(set(LFS) - set(UNPUBLISHED)))
def test_what_passes_is_waited_for(told, name):
    one = told["lfs"][name]
    assert one["struck"] and (one["kind"], one["num_commits"], len(one["same"])) == ("published", 1, len(FILES)), one[
        "text"
    ]
    if "wait 1" in name:
        assert max(one["slept"]) >= 1.0


@pytest.mark.parametrize("name", UNPUBLISHED)
def test_what_does_not_pass_is_one_line_with_what_to_type(told, name):
    check_unpublished(told["lfs"][name], UNPUBLISHED[name], name in LFS)


@pytest.mark.parametrize("name", UNPUBLISHED_XET)
def test_through_xet_what_does_not_pass_is_one_line_too(told, name):
    check_unpublished(told["xet"][name], UNPUBLISHED_XET[name], name != "storage away")


def check_unpublished(one: dict, reason: str, strikes: bool) -> None:
    assert bool(one["struck"]) == strikes
    assert one["kind"] == "NotPublished" and reason in one["text"]
    first, adapter, again = one["text"].splitlines()
    assert first.startswith("trained and saved, but not published as ")
    assert adapter == "adapter: runs/recipe/adapter"
    assert again.startswith("again: ") and f"tunebook push runs/recipe --repo {one['repo']}" in again
    assert one["seconds"] < 120 / 10
    assert one["summary"]["status"] == "completed"
    assert one["summary"]["publish_error"] in first


def test_through_xet_what_needs_no_storage_passes(told):
    for name in ("small files", *XET_SMALL):
        if name not in UNPUBLISHED_XET:
            assert (told["xet"][name]["kind"], len(told["xet"][name]["same"])) == ("published", len(FILES))


def test_every_scenario_is_judged(told):
    known = {*UNPUBLISHED, *LFS, "first", "again", "private", "branch", "branch again", "in parts", "problems"}
    assert set(told["lfs"]) == known | {"again after a failure"}
    assert set(told["xet"]) == {*XET, *XET_SMALL, "small files", "problems"}


def test_the_hub_got_nothing_that_it_would_not_take(told):
    """Contents by their hashes, commits that change something, no token to the storage."""
    assert told["lfs"]["problems"] == told["xet"]["problems"] == []


def test_a_push_after_a_failure_sends_only_what_is_missing(told):
    again = told["lfs"]["again after a failure"]
    assert (again["kind"], again["num_commits"], again["num_uploads"]) == ("published", 1, 0)


def test_neither_tokens_nor_signed_addresses_are_told(told):
    for name, one in every(told):
        assert TOKEN not in json.dumps(one) and "signature=" not in json.dumps(one), name
        assert "Traceback" not in one["text"]


@pytest.mark.long
def test_every_push_that_fails_has_ended_within_two_minutes(tmp_path):
    started = [start(kind, tmp_path) for kind in ("clock", "xet-clock")]
    for one in started:
        for name, push in every({"": finish(one, 900)}):
            assert push["kind"] == "NotPublished" and push["seconds"] < 120, (name, push)
