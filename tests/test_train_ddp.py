"""train_ddp.py as a user starts it: by torchrun and by accelerate launch, beside finetune.py on the same recipe."""

import json
import shutil

import pytest
from safetensors.torch import load_file

from checkout import ROOT, type_command
from tiny_data import write_jsonl
from tiny_models import build_tiny_model

pytestmark = pytest.mark.slow

RECIPE = """
model: {name_or_path: ./tiny, dtype: float32}
lora: {r: 4, lora_alpha: 8}
data: {path: rows.jsonl, max_length: 256, validation: 0.2, answer_rows: 2}
training:
  global_batch_size: 4
  per_device_train_batch_size: 1
  learning_rate: 1e-3
  num_train_epochs: 2
  warmup_steps: 0.2
  weight_decay: 0.1
  lr_scheduler_type: cosine
  logging_steps: 2
  check_replicas: 2
"""
COLOURS, ANIMALS = ("red", "blue", "green", "brown"), ("cat", "dog", "fox", "hen")
COMPARED = ("eval_loss_before", "eval_loss", "first_loss", "final_loss", "num_optimizer_steps", "trained_tokens")
ACCELERATE = "accelerate launch --config_file accelerate_configs/cpu.yaml --num_processes 2"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("finetune.py", "train_ddp.py"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "accelerate_configs", folder / "accelerate_configs")
    (folder / "recipes").mkdir()
    build_tiny_model(folder / "tiny")
    words = [f"{colour} {animal}" for colour in COLOURS for animal in ANIMALS]
    answers = [" ".join(words[: 1 + place]) for place in range(len(words))]
    rows = [{"instruction": f"Name {word}.", "output": answer} for word, answer in zip(words, answers, strict=True)]
    write_jsonl(folder / "rows.jsonl", rows)
    (folder / "recipes" / "mine.yaml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def trained(checkout):
    """The names of the runs of both programs, started in three ways, whose output is looked at as well."""
    commands = {
        "mine-ddp": "torchrun --nproc_per_node=2 --standalone train_ddp.py recipes/mine.yaml",
        "by accelerate": f"{ACCELERATE} train_ddp.py recipes/mine.yaml --run-dir 'runs/by accelerate'",
        "mine": "python finetune.py recipes/mine.yaml",
    }
    for run, command in commands.items():
        result = type_command(command, checkout)
        assert result.returncode == 0, f"{run}: {result.stderr[-3000:]}"
        assert "rows per step" in result.stdout and "Traceback" not in result.stderr and "Warning" not in result.stderr
    return list(commands)


def read(folder, run, name="run_summary.json"):
    return json.loads((folder / "runs" / run / name).read_text())


def test_both_programs_and_launchers_leave_the_same_adapter_and_the_same_folder(checkout, trained):
    summaries = [read(checkout, run) for run in trained]
    adapters = [load_file(checkout / "runs" / run / "adapter" / "adapter_model.safetensors") for run in trained]
    files = [{path.name for path in (checkout / "runs" / run).iterdir()} - {"checkpoints"} for run in trained]
    assert summaries[0]["adapter_sha256"] == summaries[1]["adapter_sha256"]
    assert files[0] == files[1] == files[2]
    for summary, adapter in zip(summaries, adapters, strict=True):
        assert summary.keys() == summaries[2].keys() and summary["status"] == "completed"
        assert summary["recipe_sha256"] == summaries[2]["recipe_sha256"]
        for name in COMPARED:
            assert summary[name] == pytest.approx(summaries[2][name], abs=1e-5), name
        assert max(float((adapter[name] - adapters[2][name]).abs().max()) for name in adapter) < 1e-5
    logs = [(checkout / "runs" / run / "metrics.jsonl").read_text().splitlines() for run in ("mine-ddp", "mine")]
    for one, two in zip(*(map(json.loads, lines) for lines in logs), strict=True):
        assert one.keys() == two.keys() and one["step"] == two["step"]
        assert one.get("learning_rate") == two.get("learning_rate")


@pytest.mark.usefixtures("trained")
def test_the_same_command_again_trains_nothing(checkout):
    result = type_command("python train_ddp.py recipes/mine.yaml", checkout)
    assert result.returncode == 0 and "has finished already" in result.stdout, result.stderr[-2000:]


def test_refusals_are_those_of_finetune_and_of_the_loop(checkout):
    for words, said in (
        ("training.optim=sgd", "training.optim: train_ddp.py does not do sgd"),
        ("training.lr=1", "lr"),
    ):
        result = type_command(f"python train_ddp.py recipes/mine.yaml {words}", checkout)
        assert result.returncode == 2 and said in result.stderr and "Traceback" not in result.stderr


def test_the_plan_is_for_its_own_folder(checkout):
    result = type_command(
        "python train_ddp.py recipes/mine.yaml --plan --num-processes 4 --device cpu --json", checkout
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["run_dir"] == "runs/mine-ddp"
