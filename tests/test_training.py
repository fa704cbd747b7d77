"""Training: the same adapter on one and on two processes, losses that are global, and how a run ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import training_scenarios
from tiny_training import build_base
from tunebook.launching.process_group import start_process_group, stop_process_group
from tunebook.launching.world import World

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenarios")
    build_base(folder / "base")
    return folder


@pytest.fixture(scope="module")
def two(folder):
    """What each of two launched processes found."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    script = [str(TESTS / "training_scenarios.py"), str(folder)]
    ended = subprocess.run([*launch, *script], env=environ, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    ranks = [json.loads((folder / f"2-rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [rank["world"] for rank in ranks] == [
        {"num_processes": 2, "rank": rank, "backend": "gloo"} for rank in (0, 1)
    ]
    return [*ranks, {"stdout": ended.stdout, "stderr": ended.stderr}]


@pytest.fixture(scope="module")
def one(folder):
    """What the same scenarios find in a single process."""
    world, num_threads = World(), torch.get_num_threads()
    torch.set_num_threads(1)  # as in the launched processes; more would make tiny matrices slower
    start_process_group(world)
    yield training_scenarios.run_all(folder, world)
    stop_process_group()
    torch.set_num_threads(num_threads)


def difference(folder: Path, name: str) -> float:
    """Return the largest difference between the adapters of one and of two processes."""
    file = "model.safetensors" if name == "full" else "adapter_model.safetensors"
    single, double = (load_file(folder / processes / name / "adapter" / file) for processes in ("1", "2"))
    assert single.keys() == double.keys()
    return max(float((single[key] - double[key]).abs().max()) for key in single)


def test_every_rank_run_and_world_starts_from_one_adapter(one, two):
    for found in two[:2]:
        assert found["starts"] == one["starts"]
    assert one["starts"]["plain 0"] == one["starts"]["nf4 0"]
    assert one["starts"]["plain 1"] == one["starts"]["nf4 1"] != one["starts"]["plain 0"]


@pytest.mark.parametrize(
    "name", ["plain", "nf4", "unmeasured", "workers", "fillers", "few rows", "checkpointing", "full"]
)
def test_one_and_two_processes_train_the_same_adapter(one, two, folder, name):
    assert difference(folder, name.removesuffix(" rows")) < 1e-6
    assert two[0][name]["losses"] == pytest.approx(one[name]["losses"], abs=1e-5)
    losses = [found[name]["summary"]["eval_loss"] for found in (one, two[0])]
    assert losses == [None, None] if name == "unmeasured" else losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert two[0][name]["answers"] == two[1][name]["answers"] == list(one[name]["answers"])
    steps = 3 * training_scenarios.EPOCHS if name != "few rows" else training_scenarios.EPOCHS
    assert len(one[name]["losses"]) == steps


@pytest.mark.parametrize("name", ["plain", "nf4"])
def test_training_moves_the_adapter(one, folder, name):
    tensors = load_file(folder / "1" / name / "adapter" / "adapter_model.safetensors")
    assert all(tensor.abs().max() > 0 for key, tensor in tensors.items() if "lora_B" in key)
    assert one[name]["summary"]["eval_loss"] < one[name]["summary"]["eval_loss_before"]


def test_the_logged_loss_is_the_mean_of_all_tokens_of_the_global_batch(one, two):
    for found in (one, *two[:2]):
        assert found["first loss"]["true"] == pytest.approx(one["plain"]["losses"][0], abs=1e-5)
    assert two[0]["plain"]["losses"][0] == pytest.approx(one["first loss"]["true"], abs=1e-5)


@pytest.mark.parametrize(("packed", "padded"), [("packed", "plain"), ("packed nf4", "nf4")])
def test_packing_trains_the_same_adapter_without_padding(one, two, folder, packed, padded):  # case G01
    for world, found in (("1", one), ("2", two[0])):
        joined, apart = (
            load_file(folder / processes / name / "adapter" / "adapter_model.safetensors")
            for processes, name in ((world, packed), ("1", padded))
        )
        assert max(float((joined[key] - apart[key]).abs().max()) for key in apart) < 1e-6
        mine, theirs = found[packed], one[padded]
        assert mine["losses"] == pytest.approx(theirs["losses"], abs=1e-5)
        assert mine["summary"]["eval_loss"] == pytest.approx(theirs["summary"]["eval_loss"], abs=1e-6)
        assert mine["summary"]["trained_tokens"] == theirs["summary"]["trained_tokens"]
        padding = mine["summary"]["padded_tokens"] / mine["summary"]["processed_tokens"]
        assert padding <= 0.01 < theirs["summary"]["padded_tokens"] / theirs["summary"]["processed_tokens"]


def test_measuring_and_loading_in_other_processes_do_not_change_training(one, two):
    for found in (one, two[0]):
        hashes = {name: found[name]["summary"]["adapter_sha256"] for name in ("plain", "nf4", "unmeasured", "workers")}
        assert hashes["nf4"] == hashes["unmeasured"]
        assert hashes["plain"] == hashes["workers"]
        assert found["plain"]["summary"]["processed_tokens"] == found["workers"]["summary"]["processed_tokens"]


def test_micro_batch_and_checkpointing_change_nothing(one, folder):
    plain, fillers = (
        load_file(folder / "1" / name / "adapter" / "adapter_model.safetensors") for name in ("plain", "fillers")
    )
    assert max(float((plain[key] - fillers[key]).abs().max()) for key in plain) < 1e-6
    assert one["plain"]["losses"] == pytest.approx(one["fillers"]["losses"], abs=1e-5)
    nf4, checkpointing = (
        load_file(folder / "1" / name / "adapter" / "adapter_model.safetensors") for name in ("nf4", "checkpointing")
    )
    assert max(float((nf4[key] - checkpointing[key]).abs().max()) for key in nf4) < 1e-6


def test_held_out_loss_is_the_mean_of_all_tokens_whatever_the_batch_size_and_the_world(one, two):
    values = [found["evaluations"][size] for found in (one, *two[:2]) for size in found["evaluations"]]
    assert len(values) == 15
    assert max(values) - min(values) < 1e-6


def test_bfloat16_trains_float32_weights_to_nearly_the_same_loss(one, two, folder):
    for found in (one, two[0]):
        losses, exact = found["bfloat16"]["losses"], found["nf4"]["losses"][:3]
        assert losses == pytest.approx(exact, rel=1e-2) and losses != exact
    tensors = load_file(folder / "1" / "bfloat16" / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_tokens_and_rows_are_counted_over_all_processes(one, two):
    for name in ("plain", "fillers"):
        single, double = one[name]["summary"], two[0][name]["summary"]
        data = training_scenarios.build_data()
        trained = sum(label != -100 for row in data.train for label in row["labels"][1:]) * training_scenarios.EPOCHS
        tokens = sum(data.train["length"]) * training_scenarios.EPOCHS
        for summary in (single, double):
            assert summary["trained_tokens"] == trained
            assert summary["processed_tokens"] - summary["padded_tokens"] == tokens
            assert summary["num_optimizer_steps"] == 9
            assert summary["tokens_per_second"] == pytest.approx(trained / summary["training_seconds"])
            assert 50e6 < summary["peak_memory_bytes"] < 4e9
            assert (summary["status"], summary["exit_code"]) == ("completed", 0)
        assert (single["world_size"], single["backend"]) == (1, None)
        assert (double["world_size"], double["backend"]) == (2, "gloo")


def test_only_rank_0_writes(two, folder):
    rank_0, rank_1 = ({Path(path).name for path in found["written"]} for found in two[:2])
    written = {"adapter_model.safetensors", "adapter_config.json", "tokenizer_config.json", "metrics.jsonl"}
    assert written | {"manifest.json"} <= {name.removeprefix(".").removesuffix(".writing") for name in rank_0}
    assert rank_1 == set()
    files = [path for path in (folder / "2").rglob("*") if path.is_file()]
    assert {path.name for path in files if path.stat().st_mode & 0o002} == set()
    assert any(path.name == "rng_state_1.pth" for path in files), "rank 0 keeps the other's random state, too"


def test_summary_and_adapter_are_on_disk_and_agree(one, folder):
    run_dir = folder / "1" / "nf4"
    summary = json.loads((run_dir / "run_summary.json").read_text())
    versions = summary.pop("versions")
    held = json.loads(json.dumps(one["nf4"]["summary"]))  # JSON has lists where the summary has tuples
    assert summary == {key: value for key, value in held.items() if key != "versions"}
    assert {"python", "torch", "transformers", "accelerate", "peft", "bitsandbytes", "datasets"} <= versions.keys()
    assert versions["torch"] == torch.__version__
    from tunebook.model.adapter import tensor_sha256

    tensors = load_file(Path(summary["adapter_dir"]) / "adapter_model.safetensors")
    assert tensor_sha256(tensors) == summary["adapter_sha256"]
    assert summary["first_loss"] == one["nf4"]["losses"][0] and summary["final_loss"] == one["nf4"]["losses"][-1]


def test_an_adapter_going_on_from_inside_epoch_2_is_that_of_the_unbroken_run(one, two):
    for name in ("resumed", "packed and resumed"):
        assert [found[name]["difference"] for found in (one, *two[:2])] == [0.0, 0.0, 0.0]


def test_a_loss_that_is_no_number_ends_every_rank_and_is_written_down(one, two, folder):
    for found, processes in ((one, 1), (two[0], 2), (two[1], 2)):
        assert "the loss became nan" in found["broken"]["error"] and "learning_rate" in found["broken"]["error"]
        summary = json.loads((folder / str(processes) / "broken" / "run_summary.json").read_text())
        assert (summary["status"], summary["exit_code"]) == ("failed", 1)
        assert "the loss became nan" in summary["error"]
        assert summary["adapter_sha256"] is None and not (folder / str(processes) / "broken" / "adapter").exists()


def test_a_refusal_of_one_rank_is_the_refusal_of_all(two, folder):
    for found in two[:2]:
        assert "rank 1: no such folder here" in found["agreed"]["refusal"]
    assert not (folder / "2" / "agreed").exists(), "a refused start makes no folder"


def test_plain_lines_come_from_rank_0_alone_and_steer_no_terminal(two):
    stdout, stderr = two[2]["stdout"], two[2]["stderr"]
    assert "\r" not in stdout and "\x1b" not in stdout
    lines = [line for line in stdout.splitlines() if line.startswith("step 9/9") and "loss" in line]
    # Each of the nine recipes of nine steps says its last loss once, and but for one its last held-out loss.
    assert len(lines) == 17
    assert "Warning" not in stderr


def test_metrics_are_one_event_a_line(one, folder):
    events = [json.loads(line) for line in (folder / "1" / "plain" / "metrics.jsonl").read_text().splitlines()]
    losses = [event for event in events if "loss" in event]
    evaluations = [event for event in events if "eval_loss" in event]
    assert [event["step"] for event in losses] == list(range(1, 10))
    assert [event["step"] for event in evaluations] == [0, 3, 6, 9]
    measured = {"loss", "learning_rate", "grad_norm", "tokens_per_second", "memory_bytes"}
    assert all(event.keys() == {"step", "epoch", *measured, "seconds"} for event in losses)
    assert [event["seconds"] for event in events] == sorted(event["seconds"] for event in events)
