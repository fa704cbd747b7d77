"""Signals and deaths under the launchers themselves: no orphan, recovery by --max-restarts, the root cause last."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from broken_off import adapter_of, largest_difference, make_place, steps_saved, summary_of
from checkout import ROOT
from fork_server import shared_server
from launched_ranks import clean_environ

pytestmark = pytest.mark.slow
LONG_RUN = ("training.num_train_epochs=2000", "training.save_steps=1000000", "data.answer_rows=0")
LAUNCH = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"],
    "restarting": ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--max-restarts=1"],
    "accelerate": ["-m", "accelerate.commands.launch", "--num_processes=1"],
    "tunebook": ["-c", "from tunebook.commands.cli import main; main()", "launch"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("launched"))


class Launched:
    """A launcher that runs the recipe, with the processes below it."""

    def __init__(self, place, launcher, name, *words, script=ROOT / "finetune.py", **fault):
        self.log = place / f"{name}.log"
        script = [] if launcher == "tunebook" else [str(script)]
        after = ["--num-processes", "2"] if launcher == "tunebook" else []
        command = [sys.executable, *LAUNCH[launcher], *script, "recipe.yaml", *after, "--run-dir", name, *words]
        environ = {**clean_environ(), "OMP_NUM_THREADS": "1", "TUNEBOOK_CACHE": str(place / "cache"), **fault}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=place, env=environ, stdout=log, stderr=log)

    def output(self):
        return self.log.read_text()

    def until(self, text, seconds=120):
        deadline = time.monotonic() + seconds
        while text not in self.output():
            assert time.monotonic() < deadline and self.process.poll() is None, self.output()[-4000:]
            time.sleep(0.05)

    def ranks(self):
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if b"finetune.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_until_gone(pids, seconds=30):
    """Return the seconds until no such process runs any more."""
    began = time.monotonic()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            while "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]:
                assert time.monotonic() - began < seconds, f"{pid} runs on"
                time.sleep(0.05)
    return time.monotonic() - began


def test_restarts_recover_without_anyone(place):
    launched = Launched(place, "restarting", "recovered", "--fresh", "training.save_steps=1")
    launched.until("step 3/9")
    os.kill(launched.ranks()[1], signal.SIGKILL)
    assert launched.process.wait(timeout=200) == 0, launched.output()[-4000:]
    assert "going on from recovered/checkpoints/checkpoint-" in launched.output()
    assert summary_of(place / "recovered")["status"] == "completed"
    server = shared_server()
    log = place / "unbroken.log"
    cache = str(place / "cache")
    life = server.wait(server.start(["recipe.yaml", "--run-dir", "unbroken"], 2, place, log, TUNEBOOK_CACHE=cache))
    assert life.rank_codes() == [0, 0]
    assert largest_difference(adapter_of(place / "recovered"), adapter_of(place / "unbroken")) == 0


def test_a_killed_rank_takes_the_others_along_and_is_named_last(place):
    launched = Launched(place, "torchrun", "died", *LONG_RUN)
    launched.until("step 3/")
    ranks = launched.ranks()
    os.kill(ranks[1], signal.SIGKILL)
    assert launched.process.wait(timeout=30) == 1
    assert wait_until_gone(ranks) < 1
    ending = launched.output()[launched.output().rindex("Root Cause") :]
    assert "rank      : 1" in ending and "SIGKILL" in ending
    assert "another process of the group ended" in launched.output()


@pytest.mark.long
@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ("out of memory before step 1", {"FAULT": "no_memory_for_the_model", "FAULT_MODE": "cuda"}),
        ("out of memory at step 2", {"FAULT": "out_of_memory", "FAULT_NTH": "4"}),
    ],
    ids=["loading", "training"],
)
def test_a_rank_that_runs_out_of_memory_alone_says_so_itself_and_is_the_root_cause(place, said, fault):
    script = ROOT / "tests" / "faulty_finetune.py"
    name = f"no-memory-{fault['FAULT']}"
    launched = Launched(place, "torchrun", name, script=script, FAULT_RANKS="1", **fault)
    assert launched.process.wait(timeout=120) == 1
    assert launched.output().count(f"failed: rank 1: {said}") == 1, launched.output()[-4000:]
    assert "interrupted by" not in launched.output()
    ending = launched.output()[launched.output().rindex("Root Cause") :]
    assert "rank      : 1" in ending and "exitcode  : 1" in ending


@pytest.mark.parametrize(
    ("launcher", "sent", "code"),
    [
        ("tunebook", signal.SIGTERM, 75),
        pytest.param("accelerate", signal.SIGTERM, None, marks=pytest.mark.long),
        pytest.param("torchrun", signal.SIGUSR1, None, marks=pytest.mark.long),
    ],
)
def test_a_signal_to_the_launcher_saves_and_leaves_no_orphan(place, launcher, sent, code):
    # accelerate forwards nothing to a single process, and SIGUSR1 kills torchrun: ranks hear of their launcher's end.
    name = f"signalled-{launcher}"
    launched = Launched(place, launcher, name, *LONG_RUN)
    launched.until("step 3/")
    ranks = launched.ranks()
    assert len(ranks) == (1 if launcher == "accelerate" else 2)
    launched.process.send_signal(sent)
    ended = launched.process.wait(timeout=30)
    assert code is None or ended == code, launched.output()[-3000:]
    assert wait_until_gone(ranks) < 20
    [step] = steps_saved(place / name)
    cause = "SIGTERM" if launcher == "tunebook" else "the end of its launcher"
    assert f"stopped by {cause} at step {step} of" in launched.output()
    assert summary_of(place / name)["status"] == "interrupted"
