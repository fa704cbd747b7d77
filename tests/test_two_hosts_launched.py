"""torchrun and accelerate launch over two machines, as they are typed; the quick half is tests/test_two_hosts.py."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from broken_off import adapter_of, largest_difference, make_place, summary_of
from checkout import ROOT
from launched_ranks import clean_environ
from two_hosts import ADDRESSES, TwoHosts

pytestmark = [pytest.mark.slow, pytest.mark.long]
BIN = Path(sys.executable).parent
TIMEOUT = 20
CONFIG = ROOT / "accelerate_configs" / "multi_node.yaml"


@pytest.fixture(scope="module")
def hosts():
    made = TwoHosts()
    yield made
    made.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    made = make_place(tmp_path_factory.mktemp("launched"))
    run = ["--run-dir", "one", "recipe.yaml"]
    done = subprocess.run(
        [BIN / "torchrun", "--nproc_per_node=2", "--standalone", ROOT / "finetune.py", *run],
        cwd=made,
        env=environ(made),
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return made


def environ(place):
    return {**clean_environ(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TUNEBOOK_CACHE": str(place / "cache")}


def torchrun(rank, port):
    master = [f"--master_addr={ADDRESSES[0]}", f"--master_port={port}"]
    return [BIN / "torchrun", "--nnodes=2", "--nproc_per_node=2", f"--node_rank={rank}", *master]


def accelerate(rank, port):
    machines = ["--num_machines", 2, "--num_processes", 4, "--machine_rank", rank]
    main = ["--main_process_ip", ADDRESSES[0], "--main_process_port", port]
    return [BIN / "accelerate", "launch", "--config_file", CONFIG, *machines, *main]


class Launched:
    """The same command typed on both hosts."""

    def __init__(self, hosts, place, launcher, port, run_dir, script=ROOT / "finetune.py", **fault):
        self.logs = [place / f"{run_dir}-{port}-{rank}.log" for rank in range(2)]
        run = [script, "recipe.yaml", "--run-dir", run_dir, f"training.ddp_timeout={TIMEOUT}"]
        self.processes = []
        for rank, log in enumerate(self.logs):
            command = hosts.command(rank, *launcher(rank, port), *run)
            with log.open("w") as file:
                started = subprocess.Popen(command, cwd=place, env=environ(place) | fault, stdout=file, stderr=file)
            self.processes.append(started)

    def wait(self, seconds=200):
        deadline = time.monotonic() + seconds
        return [process.wait(timeout=max(deadline - time.monotonic(), 1)) for process in self.processes]

    def output(self):
        return "\n".join(log.read_text() for log in self.logs)


def test_torchrun_trains_the_adapter_of_one_machine(hosts, place):
    launched = Launched(hosts, place, torchrun, 29501, "by-torchrun")
    assert launched.wait() == [0, 0], launched.output()[-6000:]
    assert largest_difference(adapter_of(place / "by-torchrun"), adapter_of(place / "one")) < 1e-6
    assert summary_of(place / "by-torchrun")["world_size"] == 4


def test_accelerate_is_cut_off_and_goes_on(hosts, place):
    go_on = place / "go on"
    fault = {"FAULT": "hang", "FAULT_MODE": "sleeping", "FAULT_STEP": "5", "FAULT_RANKS": "3", "FAULT_FILE": str(go_on)}
    launched = Launched(hosts, place, accelerate, 29502, "cut", script=ROOT / "tests" / "faulty_finetune.py", **fault)
    while "[fault]" not in launched.output():
        assert [process.poll() for process in launched.processes] == [None, None], launched.output()[-6000:]
        time.sleep(0.1)
    hosts.cut()
    go_on.touch()
    began = time.monotonic()
    try:
        assert launched.wait(TIMEOUT + 30) == [1, 1]
    finally:
        hosts.mend()
    took = time.monotonic() - began
    print(f"both sides ended {took:.1f} s after the cut")
    assert took < TIMEOUT + 10
    here, there = (log.read_text() for log in launched.logs)
    assert "failed: ranks 2 and 3 do not answer in step 6" in here
    assert "no word comes from rank 0's machine" in there
    again = Launched(hosts, place, accelerate, 29503, "cut")
    assert again.wait() == [0, 0], again.output()[-6000:]
    assert "going on from cut/checkpoints/checkpoint-4" in again.logs[0].read_text()
    assert largest_difference(adapter_of(place / "cut"), adapter_of(place / "one")) < 1e-6
