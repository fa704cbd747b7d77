"""What DDP promises and what exactness means, for the Trainer and for the loop written by hand, with real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from checkout import ROOT
from tiny_training import build_base

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parent
LOOPS = ("trainer", "by hand")
LONG = pytest.mark.long
WORLDS = [1, 2, pytest.param(4, marks=LONG), pytest.param(8, marks=LONG)]
GROUPS = [2, pytest.param(4, marks=LONG)]
REFERENCE = {"plain": "plain, micro-batch 1, trainer", "nf4": "nf4, micro-batch 1, trainer"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    build_base(folder / "base")
    return folder


@pytest.fixture(scope="module")
def launched(folder):
    """Return what the ranks of a world found in a set of scenarios, launching them the first time it is asked for."""
    found = {}

    def launch(scenarios, num_processes):
        asked = (scenarios, num_processes)
        if asked not in found:
            found[asked] = None  # a launch that fails is not repeated for every test
            found[asked] = _launch(folder, scenarios, num_processes)
        assert found[asked] is not None, "the launch has failed before"
        return found[asked]

    return launch


def _launch(folder, scenarios, num_processes):
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(num_processes), "--standalone"]
    command += [str(TESTS / "ddp_scenarios.py"), str(folder), scenarios]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1500, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr[-4000:]
    ranks = []
    for rank in range(num_processes):
        stem = folder / f"{scenarios}-{num_processes}-rank{rank}"
        ranks.append({**json.loads(stem.with_suffix(".json").read_text()), "out": stem.with_suffix(".txt").read_text()})
        backend = "gloo" if num_processes > 1 else None
        assert ranks[-1]["world"] == {"num_processes": num_processes, "rank": rank, "backend": backend}
    return ranks


def adapter(folder, num_processes, name):
    return load_file(folder / str(num_processes) / name / "adapter" / "adapter_model.safetensors")


def difference(one, two):
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max()) for name in one)


@pytest.mark.parametrize("num_processes", WORLDS)
def test_every_layout_and_loop_trains_one_adapter(launched, folder, num_processes):
    [single] = launched("exactness", 1)
    ranks = launched("exactness", num_processes)
    runs = {name: run for name, run in ranks[0]["exactness"].items() if not name.startswith("other")}
    assert len(runs) >= 7, "plain by both loops, NF4 by both, checkpointing by both"
    for name, run in runs.items():
        reference = REFERENCE[name.split(",")[0]]
        expected = single["exactness"][reference]
        apart = difference(adapter(folder, 1, reference), adapter(folder, num_processes, name))
        assert len(run["losses"]) == len(expected["losses"]) == 9
        losses = max(abs(mine - theirs) for mine, theirs in zip(run["losses"], expected["losses"], strict=True))
        held_out = abs(run["summary"]["eval_loss"] - expected["summary"]["eval_loss"])
        print(
            f"{num_processes} processes, {name}: adapter {apart:.1e}, losses {losses:.1e}, held-out loss {held_out:.1e}"
        )
        assert apart < 1e-6 and losses < 1e-5 and held_out < 1e-6
        assert run["summary"]["trained_tokens"] == expected["summary"]["trained_tokens"]
        assert {rank["exactness"][name]["summary"]["adapter_sha256"] for rank in ranks} == {
            run["summary"]["adapter_sha256"]
        }, "every rank ends with the same bits"


@pytest.mark.parametrize("num_processes", WORLDS)
def test_checkpointing_changes_nothing(launched, folder, num_processes):
    launched("exactness", num_processes)
    for loop in LOOPS:
        names = [f"nf4, {how}, {loop}" for how in ("checkpointing", "micro-batch 1")]
        assert difference(*(adapter(folder, num_processes, name) for name in names)) < 1e-6


def test_another_seed_is_another_adapter(launched, folder):
    runs = launched("exactness", 2)[0]["exactness"]
    for loop in LOOPS:
        other = adapter(folder, 2, f"other seed, {loop}")
        assert difference(other, adapter(folder, 2, REFERENCE["plain"])) > 1e-3
        assert runs[f"other seed, {loop}"]["losses"] != runs[REFERENCE["plain"]]["losses"]
    assert difference(adapter(folder, 2, "other seed, trainer"), adapter(folder, 2, "other seed, by hand")) < 1e-6


@pytest.mark.parametrize("num_processes", WORLDS)
def test_data_smaller_than_a_step_trains_the_same_adapter(launched, folder, num_processes):
    [single], ranks = launched("exactness", 1), launched("exactness", num_processes)
    steps = {"1 rows": 3, "3 rows": 3, "17 rows": 6, "rows of one token": 3}
    for name, run in ranks[0]["small data"].items():
        rows = name.split(", ")[0]
        expected = single["small data"][f"{rows}, trainer"]
        assert run["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert run["summary"]["num_optimizer_steps"] == len(run["losses"]) == steps[rows]
        assert run["summary"]["trained_tokens"] == expected["summary"]["trained_tokens"]
        assert difference(adapter(folder, 1, f"{rows}, trainer"), adapter(folder, num_processes, name)) < 1e-6


@pytest.mark.parametrize("worlds", [(1, 2), pytest.param((1, 2, 4), marks=LONG)], ids=str)
def test_held_out_loss_is_one_number_in_every_world_and_batch_size(launched, worlds):
    found = [rank["held out"] for count in worlds for rank in launched("exactness", count)]
    for num_rows in (3, 7):
        values = [value for one in found for name, value in one.items() if name.startswith(f"{num_rows} rows")]
        assert len(values) == sum(worlds) * (4 * 2 + 1), "four batch sizes by two loops, and the truth, on each rank"
        print(f"held-out loss of {num_rows} rows: {min(values)} to {max(values)}")
        assert max(values) - min(values) < 1e-6


@pytest.mark.parametrize("num_processes", WORLDS)
def test_the_logged_loss_of_every_step_is_the_mean_over_all_labels_of_all_ranks(launched, num_processes):
    found = launched("exactness", num_processes)[0]["global loss"]
    assert len(found["true"]) == 3 and found["labels of two halves"][0] != found["labels of two halves"][1]
    for loop in LOOPS:
        apart = [abs(mine - true) for mine, true in zip(found[loop], found["true"], strict=True)]
        assert max(apart) < 1e-5, "the short last step counts by its own labels"


@pytest.mark.parametrize(
    ("num_processes", "linear", "sqrt"),
    [(1, 3e-4, 3e-4), (2, 6e-4, 3e-4 * 2**0.5), pytest.param(4, 1.2e-3, 6e-4, marks=LONG)],
)
def test_a_rate_chosen_for_one_process_grows_with_the_batch(launched, num_processes, linear, sqrt):
    found = launched("exactness", num_processes)[0]["scaled rate"]
    for loop in LOOPS:
        assert found[f"none, {loop}"] == pytest.approx(3e-4)
        assert found[f"linear, {loop}"] == pytest.approx(linear)
        assert found[f"sqrt, {loop}"] == pytest.approx(sqrt)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("num_processes", GROUPS)
class TestPromises:
    """Each by both loops."""

    def test_gradients_after_backward_are_the_mean_over_ranks(self, launched, num_processes, loop):
        for rank in launched("promises", num_processes):
            found = rank["mean gradient"][loop]
            assert found["from the mean"] < 1e-7
            assert found["from the own"] > 1e-3 and found["largest"] > 1e-3

    def test_replicas_hold_the_same_bits_after_every_step(self, launched, num_processes, loop):
        ranks = [rank["replicas"][loop] for rank in launched("promises", num_processes)]
        assert all(hashes == ranks[0] for hashes in ranks)
        assert len(ranks[0]) == len(set(ranks[0])) == 6, "and each step changes them"

    def test_one_bit_of_difference_is_found_and_named(self, launched, num_processes, loop):
        ranks = launched("promises", num_processes)
        tensor = ranks[-1]["parted"]["tensor"]
        for rank in ranks:
            said = rank["parted"][loop]["said"]
            assert "differ after step 4" in said and tensor in said and f"on rank {num_processes - 1}" in said
            assert rank["parted"][loop]["by all"]

    def test_each_row_is_trained_once_per_epoch_and_epochs_differ(self, launched, num_processes, loop):
        ranks = [rank["rows of an epoch"][loop]["epochs"] for rank in launched("promises", num_processes)]
        for epoch in (0, 1):
            assert sorted(row for epochs in ranks for row in epochs[epoch]) == list(range(21))
        assert ranks[0][0] != ranks[0][1]

    def test_evaluation_is_in_order_and_takes_each_row_once(self, launched, num_processes, loop):
        shares = [rank["rows of an epoch"][loop]["evaluated"] for rank in launched("promises", num_processes)]
        for share, rank in zip(shares, range(num_processes), strict=True):
            assert share == list(range(rank, 7, num_processes)) * 2, "in order, after each of two epochs"

    def test_one_reduction_of_the_trained_gradients_per_step_however_many_micro_steps(
        self, launched, num_processes, loop
    ):
        for rank in launched("promises", num_processes):
            found = rank["collectives"][loop]
            assert found["micro-steps"] == 8 // num_processes > 1
            gradients = f"all_reduce {found['trained']}"
            assert found["trained"] > 1000 and len(found["steps"]) == 5
            # The label count and the vote on stopping are single numbers; nothing travels for a micro-step.
            numbers = {"trainer": {"all_gather 1": 1, "all_reduce 1": 1}, "by hand": {"all_reduce 1": 2}}[loop]
            for step in found["steps"][1:]:
                assert step == {gradients: 1, **numbers}, "float32 elements of the trained parameters, in one bucket"
            # The look at step 2 has the log of step 1 as well, and after step 1 DDP sends the order of its buckets.
            first = found["steps"][0]
            assert first.pop(gradients) == 1 and all(int(name.split()[1]) < 100 for name in first)

    def test_ranks_that_would_train_different_runs_are_refused_with_the_differing_values(
        self, launched, num_processes, loop
    ):
        for rank in launched("promises", num_processes):
            rows, recipe = rank["other runs"]["rows"], rank["other runs"]["recipe"]
            last = f"on rank {num_processes - 1}"
            assert f"13 {last}" in rows and "training rows 21 on rank" in rows and f"4 {last}" in rows
            assert "training.learning_rate 0.001 on rank" in recipe and f"0.002 {last}" in recipe

    def test_unused_parameters_are_named_with_the_setting(self, launched, num_processes, loop):
        for rank in launched("promises", num_processes):
            for when, place in (("always", "in step 1"), ("last micro-step", "in the last micro-step")):
                said = rank["unused"][f"{when}, {loop}"]
                assert "unused" in said and "layers.0.mlp.up_proj.lora_A" in said and place in said
                assert "training.ddp_find_unused_parameters" in said
            assert rank["unused"][f"allowed, {loop}"] == 6, "steps taken"


@pytest.mark.parametrize("num_processes", GROUPS)
def test_a_rank_that_alone_skips_parameters_says_so_and_the_others_do_not_wait(launched, num_processes):
    ranks = [rank["unused on one rank"] for rank in launched("promises", num_processes)]
    assert "unused" in ranks[-1]["said"] and not ranks[-1]["by all"]
    assert all("waited" in rank for rank in ranks[:-1])


@pytest.mark.parametrize("num_processes", GROUPS)
def test_only_rank_0_writes_and_prints(launched, num_processes):
    main, *others = launched("promises", num_processes)
    assert {"adapter_model.safetensors", "metrics.jsonl"} <= {Path(path).name for path in main["written"]}
    assert "step 9/9" in main["out"] and main["printed"]["status"] == "completed"
    for other in others:
        assert other["out"] == "" and other["written"] == []
