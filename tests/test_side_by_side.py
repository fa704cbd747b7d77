"""Ranks and runs beside each other: who writes, whose port it is, and how the hand-written loop is broken off."""

import os
import signal
import socket
from pathlib import Path

import pytest

from broken_off import NUM_STEPS, adapter_of, largest_difference, steps_saved, summary_of
from test_interruption import LONG, until
from test_resume import Place, same_result

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("side"))


@pytest.fixture(scope="module")
def two_at_once(place):
    """The folders of two runs of finetune.py on two processes each, beside each other."""
    lives = [place.begin(name, 2) for name in ("one", "other")]
    for life in lives:
        assert place.server.wait(life).rank_codes() == [0, 0], life.output()[-3000:]
    return [place.folder / name for name in ("one", "other")]


@pytest.fixture(scope="module")
def by_hand(place):
    """The folder of a run of train_ddp.py on two processes."""
    life = place.run("by-hand", 2, SCRIPT="train_ddp")
    assert life.rank_codes() == [0, 0], life.output()[-3000:]
    return place.folder / "by-hand"


@pytest.fixture
def taken_port():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


# Five times in all; once, with the rest in `make test-slow`, is what the suite has time for.
@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.long) for turn in range(1, 5))])
def test_only_rank_0_writes_into_the_run_folder_in_twenty_saves(place, turn):
    told = place.folder / f"writes-{turn}"
    words = ("training.num_train_epochs=7", "training.save_steps=1", "training.save_total_limit=2")
    life = place.run(f"saving-{turn}", 2, *words, FAULT="tell_writes", FAULT_FILE=str(told))
    assert life.rank_codes() == [0, 0], life.output()[-3000:]
    by_rank = [Path(f"{told}.{rank}").read_text().splitlines() for rank in (0, 1)]
    saves = [line for line in by_rank[0] if line.endswith(".writing/optimizer.pt")]
    assert len(saves) == 21 and by_rank[1] == []
    assert adapter_of(place.folder / f"saving-{turn}")


def test_a_taken_port_is_named_with_the_remedy(place, taken_port):
    life = place.begin("taken", 2, MASTER_PORT=str(taken_port))
    until(life, "refused:", place)
    os.kill(life.pids[1], signal.SIGTERM)  # as the launcher does once rank 0 has left
    assert place.server.wait(life).rank_codes() == [2, 75], life.output()[-3000:]
    [line] = [line for line in life.output().splitlines() if line.startswith("refused:")]
    assert str(taken_port) in line and "MASTER_PORT" in line
    assert "Traceback" not in life.output() and not (place.folder / "taken").exists()


def test_two_runs_at_once_are_two_worlds(two_at_once):
    for folder in two_at_once:
        assert summary_of(folder)["world_size"] == 2
    same_result(*two_at_once)


def test_the_hand_loop_trains_the_adapter_of_the_trainer(two_at_once, by_hand):
    assert largest_difference(adapter_of(by_hand), adapter_of(two_at_once[0])) < 1e-6
    assert summary_of(by_hand)["num_optimizer_steps"] == NUM_STEPS


def test_the_hand_loop_stops_on_all_ranks_and_starts_over(place, by_hand):
    life = place.begin("stopped", 2, *LONG, SCRIPT="train_ddp")
    until(life, "step 3/", place)
    os.kill(life.pids[1], signal.SIGTERM)
    place.server.wait(life)
    assert life.rank_codes() == [75, 75], life.output()[-3000:]
    assert "and nothing is saved: run the same command again to start over" in life.output()
    assert summary_of(place.folder / "stopped")["status"] == "interrupted"
    refused = place.run("stopped", 2, SCRIPT="train_ddp")
    assert refused.rank_codes() == [2, 2] and "data.validation" in refused.output()
    again = place.run("stopped", 2, "--fresh", SCRIPT="train_ddp")
    assert again.rank_codes() == [0, 0], again.output()[-3000:]
    assert largest_difference(adapter_of(place.folder / "stopped"), adapter_of(by_hand)) == 0


def test_the_hand_loop_hears_a_signal_while_it_measures(place):
    words = ("training.per_device_eval_batch_size=1", "data.answer_rows=0")
    life = place.run("heard", 2, *words, SCRIPT="train_ddp", FAULT="signal_in_held_out_rows", FAULT_SIGNAL="SIGTERM",
                     FAULT_RANKS="1")  # fmt: skip
    assert life.rank_codes() == [75, 75] and "[fault] rank 1 SIGTERM" in life.output(), life.output()[-3000:]
    assert "stopped by SIGTERM before the first step was done" in life.output()


def test_the_hand_loop_meets_again_after_a_restart(place, by_hand):
    life = place.run("restarted", 2, SCRIPT="train_ddp", TORCHELASTIC_RESTART_COUNT="1")
    assert life.rank_codes() == [0, 0], life.output()[-3000:]
    assert largest_difference(adapter_of(place.folder / "restarted"), adapter_of(by_hand)) == 0


def test_the_hand_loop_does_not_write_over_checkpoints(place):
    words = ("training.num_train_epochs=2000", "data.answer_rows=0")
    life = place.begin("kept", 1, *words)
    until(life, "step 5/", place)
    os.kill(life.pids[0], signal.SIGKILL)
    place.server.wait(life)
    saved = steps_saved(place.folder / "kept")
    life = place.run("kept", 1, *words, SCRIPT="train_ddp")
    assert life.rank_codes() == [2] and "holds checkpoints" in life.output() and "--fresh" in life.output()
    assert steps_saved(place.folder / "kept") == saved != []


def test_a_rank_of_the_hand_loop_that_dies_is_told_of_and_the_others_end(place):
    life = place.begin("died", 2, *LONG, SCRIPT="train_ddp")
    until(life, "step 3/", place)
    os.kill(life.pids[1], signal.SIGKILL)
    place.server.wait(life)
    assert life.rank_codes() == [1, -signal.SIGKILL]
    assert "failed: another process of the group ended" in life.output() and "Traceback" not in life.output()
    assert summary_of(place.folder / "died")["status"] == "failed"
