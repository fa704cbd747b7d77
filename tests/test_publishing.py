"""Runs that publish themselves at their end, on real ranks, against a loopback Hub."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from broken_off import make_place, summary_of
from fork_server import shared_server
from hub_server import TOKEN, Fault, loopback_hub
from launched_ranks import clean_environ

pytestmark = pytest.mark.slow
SHORT = ("training.max_steps=2", "training.num_train_epochs=null", "data.answer_rows=1", "training.save_steps=5")
NAMED = ("model.base_id=org/tiny", *SHORT)


@pytest.fixture(scope="module")
def hub():
    with loopback_hub() as server:
        yield server


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("publishing"))


def start(place, hub, *words, size=2, token=TOKEN):
    environ = {"FAULT": "ask_loopback_hub", "HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HOME": str(place / "home")}
    environ["TUNEBOOK_CACHE"] = str(place / "cache")
    log = place / f"{len(list(place.glob('*.log')))}.log"
    return shared_server().start(["recipe.yaml", *words], size, place, log, **environ)


def train(place, hub, *words, **options):
    return shared_server().wait(start(place, hub, *words, **options))


def test_a_run_publishes_itself_and_does_so_once(place, hub, tmp_path):
    hub.fail()
    words = (*NAMED, "hub.repo=me/tiny", "hub.private=true", "--run-dir", "runs/good")
    life = train(place, hub, *words)
    assert life.rank_codes() == [0, 0], life.output()
    assert f"published: {hub.url}/me/tiny  (commit" in life.output()
    summary, repo = summary_of(place / "runs" / "good"), hub.repos["me/tiny"]
    assert (summary["status"], summary["exit_code"], summary["published"]) == ("completed", 0, f"{hub.url}/me/tiny")
    files, adapter = repo.files("main"), place / "runs" / "good" / "adapter"
    assert repo.private and {path.name for path in adapter.iterdir()} <= set(files) and "recipe.yaml" in files
    assert all(files[path.name] == path.read_bytes() for path in adapter.iterdir())
    assert hub.count("GET /api/whoami-v2") == 1 and not hub.problems
    for name, content in files.items():
        assert str(place).encode() not in content and b"/tmp" not in content and TOKEN.encode() not in content, name
    assert TOKEN not in life.output() and TOKEN not in json.dumps(summary)
    check_loads(files, place, tmp_path)

    hub.fail()
    life = train(place, hub, *words)
    assert life.rank_codes() == [0, 0], life.output()
    assert "has finished already" in life.output() and "there already: " in life.output()
    assert len(repo.commits) == 2 and not hub.problems


def check_loads(files, place, folder):
    """Load what the Hub has onto the base, as somebody else would, and see that it is the trained adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tunebook.model.adapter import adapter_tensors, tensor_sha256
    from tunebook.system.quiet import quiet_libraries

    for name, content in files.items():
        (folder / name).write_bytes(content)
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "org/tiny"
    with quiet_libraries():
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(place / "base"), folder)
    assert tensor_sha256(adapter_tensors(model)) == summary_of(place / "runs" / "good")["adapter_sha256"]
    assert AutoTokenizer.from_pretrained(folder).chat_template is not None


# X07
@pytest.mark.long
def test_a_push_that_fails_loses_nothing_and_the_printed_command_repeats_it(place, hub):
    hub.fail(Fault("POST .*/commit/.*", 403), Fault("GET /api/whoami-v2", 503))
    life = train(place, hub, *NAMED, "hub.repo=me/late", "--run-dir", "runs/late")
    assert life.rank_codes() == [3, 0], life.output()
    assert "note: the token is not checked, since the Hub answers with an error of its own, 503" in life.output()
    assert life.output().count("trained and saved, but not published as me/late: the token may not write") == 1
    assert "Traceback" not in life.output()
    run = place / "runs" / "late"
    summary = summary_of(run)
    assert (summary["status"], summary["exit_code"], summary["published"]) == ("completed", 3, None)
    assert "may not write" in summary["publish_error"]
    left = {path.name for path in (run / "adapter").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= left
    assert (run / "metrics.jsonl").is_file() and not hub.repos["me/late"].files("main").keys() - {".gitattributes"}

    hub.fail()
    [again] = [line for line in life.output().splitlines() if line.startswith("again:")]
    command = [sys.executable, "-m", "tunebook.commands.cli", *shlex.split(again)[2:]]
    environ = clean_environ() | {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(place / "home")}
    environ |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(command, cwd=place, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert f"published: {hub.url}/me/late" in done.stdout and not hub.problems
    assert (summary_of(run)["exit_code"], summary_of(run)["publish_error"]) == (0, None)
    for fault, code in ((Fault("POST .*/commit/.*", 403), 3), (None, 2)):
        hub.fail(*([fault] if fault else []))
        (run / "adapter" / "notes.txt").write_text("new" if fault else f"see {place}/base")
        done = subprocess.run(command, cwd=place, env=environ, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == code and done.stderr.count("\n") == (3 if fault else 1), done.stderr


def test_what_could_never_be_published_is_refused_before_training(place, hub):
    hub.fail()
    for words, token, said in (
        ((*NAMED, "hub.repo=me/never"), "hf_somebodyElsesToken", "hub.repo: the Hub does not accept the token"),
        ((*SHORT, "hub.repo=me/never"), TOKEN, "model.base_id: the run is to be published"),
    ):
        life = train(place, hub, *words, "--run-dir", "runs/never", token=token)
        assert life.rank_codes() == [2, 2] and life.output().count("refused: ") == 1, life.output()
        assert said in life.output() and token not in life.output()
    assert not (place / "runs" / "never").exists() and hub.count("POST .*") == 0


def test_other_ranks_do_not_wait_for_the_push_and_a_signal_ends_it(place, hub):
    hub.fail(Fault("POST .*/commit/.*", hang=20))
    life = start(place, hub, *NAMED, "hub.repo=me/slow", "--run-dir", "runs/slow")
    deadline = time.monotonic() + 60
    while not hub.count("POST .*/commit/.*") or life.pids[1] not in life.codes:
        assert time.monotonic() < deadline and not life.is_over, life.output()
        shared_server().poll(0.1)
    assert life.codes == {life.pids[1]: 0}
    os.kill(life.pids[0], signal.SIGTERM)
    shared_server().wait(life)
    assert life.rank_codes() == [75, 0] and "run the same command again" in life.output()
    summary = summary_of(place / "runs" / "slow")
    assert (summary["status"], summary["exit_code"], summary["published"]) == ("completed", 3, None)
    assert summary["publish_error"] == "publishing was begun and did not come to its end"
