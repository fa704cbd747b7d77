"""Training over two machines: the adapter of one, a cut cable that ends both sides, and a run that then goes on."""

import time

import pytest

from broken_off import adapter_of, largest_difference, make_place, summary_of
from fork_server import shared_server
from two_hosts import ADDRESSES, TwoHosts

pytestmark = [pytest.mark.slow, pytest.mark.long]
TIMEOUT = 20


@pytest.fixture(scope="module")
def hosts():
    made = TwoHosts()
    yield made
    made.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def server(hosts):
    return shared_server()


def start(server, place, hosts, run_dir, *words, each=2, **environ):
    """Start ranks on both hosts, `each` of them on either."""
    spread = {"HOSTS": ",".join(name for name in hosts.names for _ in range(each)), "MASTER_ADDR": ADDRESSES[0]}
    return start_anywhere(server, place, run_dir, *words, size=2 * each, **spread, **environ)


def start_anywhere(server, place, run_dir, *words, size=4, **environ):
    arguments = ["recipe.yaml", "--run-dir", run_dir, f"training.ddp_timeout={TIMEOUT}", *words]
    log = place / f"{run_dir}-{time.monotonic():.0f}.log"
    return server.start(arguments, size, place, log, TUNEBOOK_CACHE=str(place / "cache"), **environ)


def test_the_adapter_is_that_of_one_machine(server, place, hosts):
    life = server.wait(start(server, place, hosts, "two"))
    assert life.rank_codes() == [0, 0, 0, 0], life.output()
    server.wait(start_anywhere(server, place, "unbroken"))
    difference = largest_difference(adapter_of(place / "two"), adapter_of(place / "unbroken"))
    print(f"two machines and one: largest difference {difference:.1e}")
    assert difference < 1e-6
    assert summary_of(place / "two")["world_size"] == 4
    assert "is not seen on" not in life.output()


def test_a_cut_cable_ends_both_sides_in_time_and_the_run_goes_on_afterwards(server, place, hosts):
    go_on = place / "go on"
    fault = {"FAULT": "hang", "FAULT_MODE": "sleeping", "FAULT_STEP": "5", "FAULT_FILE": str(go_on)}
    life = start(server, place, hosts, "cut", FAULT_RANKS="3", **fault)
    while "[fault]" not in life.output():
        server.poll(0.1)
        assert not life.is_over, life.output()
    hosts.cut()
    go_on.touch()
    began = time.monotonic()
    try:
        server.wait(life, TIMEOUT * 2)
    finally:
        hosts.mend()
    said = life.output()
    assert life.rank_codes() == [1, 1, 1, 1], said
    took = max(life.ended.values()) - began
    print(f"all ranks ended {took:.1f} s after the cut")
    assert took < TIMEOUT + 3
    failures = [line for line in said.splitlines() if line.startswith("failed: ")]
    here, there = sorted(failures, reverse=True)
    assert here.startswith("failed: ranks 2 and 3 do not answer in step 6: a machine is gone or cut off")
    assert there.startswith("failed: rank 2 on ") and "no word comes from rank 0's machine" in there
    assert "Traceback" not in said
    summary = summary_of(place / "cut")
    assert (summary["status"], summary["exit_code"], summary["num_optimizer_steps"]) == ("failed", 1, 5)
    assert "ranks 2 and 3 do not answer in step 6" in summary["error"]
    again = server.wait(start(server, place, hosts, "cut"))
    assert again.rank_codes() == [0, 0, 0, 0], again.output()
    assert "going on from cut/checkpoints/checkpoint-4" in again.output()
    assert largest_difference(adapter_of(place / "cut"), adapter_of(place / "unbroken")) < 1e-6


def test_machines_that_differ_are_refused_before_weights_load(server, place, hosts):
    faults = ("other_packages", "other_recipe")
    lives = {name: start(server, place, hosts, name, each=1, FAULT=name, FAULT_RANKS="1") for name in faults}
    said = {}
    for name, life in lives.items():
        assert server.wait(life).rank_codes() == [2, 2], life.output()
        [said[name]] = [line for line in life.output().splitlines() if line.startswith("refused: ")]
        assert "loads weights" not in life.output() and not (place / name).exists()
    assert "peft 0.21" in said["other_packages"] and "0.20.9 on rank 1" in said["other_packages"]
    assert "bitsandbytes 0.50" in said["other_packages"] and "0.49.9 on rank 1" in said["other_packages"]
    assert "training.learning_rate 0.001 on rank 0, 0.002 on rank 1" in said["other_recipe"]
    assert "Give every rank the same recipe, data and version, on every machine" in said["other_recipe"]


def test_a_run_folder_that_only_one_machine_sees(server, place, hosts):
    fault = {"FAULT": "cannot_see_run_folder", "FAULT_RANKS": "1"}
    best = ("training.load_best_model_at_end=true", "training.eval_strategy=steps", "training.eval_steps=2")
    lives = {"apart": start(server, place, hosts, "apart", each=1, **fault)}
    lives["best"] = start(server, place, hosts, "best", *best, each=1, **fault)
    assert server.wait(lives["apart"]).rank_codes() == [0, 0]  # nobody else needs it to the end
    note = "note: apart of rank 0 is not seen on "
    [line] = [line for line in lives["apart"].output().splitlines() if line.startswith("note: apart")]
    assert line.startswith(note) and "should the run break off, it cannot go on" in line
    assert server.wait(lives["best"]).rank_codes() == [2, 2]
    said = lives["best"].output()
    assert "training.load_best_model_at_end: best of rank 0 is not seen on " in said
    assert "before training" not in said
