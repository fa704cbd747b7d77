"""Preparing the data and training on it: in several processes, by several runs, killed on the way, and ahead of it."""

import os
import signal
import sys

import pytest

from broken_off import make_place
from fork_server import shared_server
from tunebook.commands import cli

pytestmark = pytest.mark.slow
SLOW = {"FAULT": "slow_preparation", "FAULT_SECONDS": "12"}
SHORT = ("training.ddp_timeout=5", "training.max_steps=1", "training.num_train_epochs=null", "data.answer_rows=0")


@pytest.fixture(scope="module")
def server():
    return shared_server()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("preparing"))


def begin(server, place, name, cache, **fault):
    words = ["recipe.yaml", "--run-dir", name, *SHORT]
    return server.start(words, 2, place, place / f"{name}.log", TUNEBOOK_CACHE=str(place / "caches" / cache), **fault)


def cached(place, cache):
    return sorted(path.suffix for path in (place / "caches" / cache / "tokens").iterdir() if path.is_dir())


def test_two_runs_wait_for_one_slow_preparation_longer_than_a_collective_may(server, place):  # cases P05 and C04
    lives = [begin(server, place, name, "shared", **SLOW) for name in ("first", "second")]
    for life in lives:
        server.wait(life)
    outputs = [life.output() for life in lives]
    assert [life.rank_codes() for life in lives] == [[0, 0], [0, 0]], outputs
    assert sum(output.count("prepares slowly") for output in outputs) == 1
    assert cached(place, "shared") == [""]
    waits = [output for output in outputs if "prepares slowly" not in output]
    assert waits[0].count("waiting for another process of this machine, which prepares the same data") == 1


def test_a_killed_preparation_is_made_again(server, place):  # case C04
    killed = begin(server, place, "killed", "again", **{**SLOW, "FAULT_SECONDS": "80"})
    while "prepares slowly" not in killed.output():
        assert not killed.is_over, killed.output()
        server.poll(0.1)
    for pid in killed.pids:
        os.kill(pid, signal.SIGKILL)
    server.wait(killed)
    assert cached(place, "again")[0].startswith(".partial-")
    life = server.wait(begin(server, place, "killed", "again"))
    assert life.rank_codes() == [0, 0], life.output()
    assert cached(place, "again") == [""]


@pytest.mark.long
def test_machines_that_are_too_far_apart_are_told_why(server, place):  # case P05
    fault = {**SLOW, "FAULT_SECONDS": "7", "FAULT_RANKS": "1", "FAULT_OWN_CACHES": "1"}
    life = server.wait(begin(server, place, "apart", "machine", **fault))
    assert life.rank_codes()[0] == 2, life.output()
    assert "ddp_timeout, run `tunebook prepare RECIPE` on it first" in life.output()
    assert "Traceback" not in life.output()


def test_what_is_prepared_ahead_is_there_when_the_run_starts(server, place, monkeypatch, capsys):  # case P05
    monkeypatch.chdir(place)
    monkeypatch.setenv("TUNEBOOK_CACHE", str(place / "caches" / "ahead"))
    monkeypatch.setattr(sys, "argv", ["tunebook", "prepare", "recipe.yaml", *SHORT])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "data: 27 rows (alpaca) = 22 to train, 5 held out; " in said and "prepared in " in said
    life = server.wait(begin(server, place, "ahead", "ahead", **SLOW))
    assert life.rank_codes() == [0, 0], life.output()
    assert "prepares slowly" not in life.output()


def test_preparing_ahead_refuses_what_a_run_would(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    for word, text in (("data.max_lenth=3", "Nearest: max_length"), ("data.max_length=3", "anything left to train on")):
        monkeypatch.setattr(sys, "argv", ["tunebook", "prepare", "recipe.yaml", word])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        assert text in capsys.readouterr().err
