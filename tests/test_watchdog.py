"""A rank that hangs is named, with its step and its stack, within ddp_timeout, and every rank ends with exit code 1."""

import os
import signal
import time

import pytest

from broken_off import make_place, summary_of
from fork_server import ForkServer

pytestmark = [pytest.mark.slow, pytest.mark.long]
TIMEOUT = 12
# Two micro-batches a step on two ranks: a rank that hangs before the first has voted on nothing yet.
HANGING = {
    "sleeping": (1, 5, 0),
    "deaf": (1, 3, 1),
    "frozen": (1, 4, 1),
    "main": (0, 2, 0),
    "loading": (1, 0, 0),
    "by_hand": (1, 1, 0),
}
FAULTS = {"loading": "hang_loading", "by_hand": "hang_by_hand"}


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    """One life for each way to hang, all at the same time; how long each took to end after it began to hang."""
    place = make_place(tmp_path_factory.mktemp("hanging"))
    server = ForkServer()
    started = {}
    for mode, (rank, step, micro) in HANGING.items():
        words = ["recipe.yaml", "--run-dir", mode, f"training.ddp_timeout={TIMEOUT}"]
        fault = {"FAULT": FAULTS.get(mode, "hang"), "FAULT_RANKS": str(rank)}
        how = {"FAULT_MODE": mode if mode in ("deaf", "frozen") else "sleeping"}
        if mode == "by_hand":
            how["SCRIPT"] = "train_ddp"
        where = {"FAULT_STEP": str(step), "FAULT_MICRO": str(micro), "TUNEBOOK_CACHE": str(place / "cache")}
        started[mode] = server.start(words, 2, place, place / f"{mode}.log", **fault, **how, **where)
    began, deadline = {}, time.monotonic() + 150
    frozen = started["frozen"]
    while not all(life.is_over for life in started.values()) and time.monotonic() < deadline:
        server.poll(0.1)
        for mode, life in started.items():
            if mode not in began and "[fault]" in life.output():
                began[mode] = time.monotonic()
        if frozen.pids[0] in frozen.codes and frozen.pids[1] not in frozen.codes:
            os.kill(frozen.pids[1], signal.SIGKILL)  # what a launcher does when the first rank has ended
    server.close()
    yield place, started, began


@pytest.mark.parametrize("mode", HANGING)
def test_all_ranks_end_with_exit_code_1_in_time(lives, mode):
    _, started, began = lives
    life = started[mode]
    assert life.is_over, life.output()[-3000:]
    assert life.rank_codes() == ([1, -signal.SIGKILL] if mode == "frozen" else [1, 1]), life.output()[-3000:]
    assert life.ended[life.pids[0]] - began[mode] < TIMEOUT + 2


@pytest.mark.parametrize(
    ("mode", "rank", "at", "innermost"),
    [
        ("sleeping", 1, "in step 6", "stand_still"),
        ("main", 0, "in step 3", "stand_still"),
        ("loading", 1, "before step 1", "stand_still"),
        ("by_hand", 1, "in step 2", "stand_still"),
    ],
)
def test_the_rank_its_step_and_its_stack_are_said(lives, mode, rank, at, innermost):
    place, started, _ = lives
    said = started[mode].output()
    assert "Traceback" not in said, said[-3000:]
    [line] = [line for line in said.splitlines() if line.startswith("failed: ")]
    assert line.startswith(f"failed: rank {rank} on ") and f"hangs {at}, after " in line
    assert f"(training.ddp_timeout is {TIMEOUT} s)" in line
    stack = said[said.index(f"the stack of rank {rank}, innermost call last:") :]
    assert innermost in stack and "time.sleep" in stack
    if mode != "loading":
        summary = summary_of(place / mode)
        assert (summary["status"], summary["exit_code"]) == ("failed", 1)
        assert f"rank {rank} on " in summary["error"] and "hangs" in summary["error"]


@pytest.mark.parametrize(("mode", "at"), [("frozen", "in step 5"), ("deaf", "in step 4")])
def test_a_rank_that_cannot_answer_is_named_by_the_others(lives, mode, at):
    _, started, _ = lives
    said = started[mode].output()
    assert f"failed: rank 1 does not answer {at}: " in said
    if mode == "deaf":  # no Python thread runs, and the stack is written all the same
        stack = said[said.index("Timeout (") :]
        assert "stand_still" in stack
