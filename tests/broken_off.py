"""Runs to break off: a tiny base, its rows and recipe on disk, and what is asked of the folders they leave."""

import json
import random
from pathlib import Path

from tiny_models import build_tiny_model

RECIPE = """
model: {name_or_path: base, dtype: float32}
lora: {r: 4, lora_alpha: 8, target_modules: [q_proj, v_proj]}
data: {path: rows.jsonl, validation: 0.2, max_length: 256, answer_rows: 2, template: alpaca}
training:
  global_batch_size: 8
  per_device_train_batch_size: 2
  learning_rate: 1.0e-3
  num_train_epochs: 3
  activation_checkpointing: false
  logging_steps: 1
  save_strategy: steps
  save_steps: 2
"""
# 27 rows, 22 of them to train: three steps an epoch, the last one ragged.
NUM_ROWS = 27
NUM_STEPS = 9


def make_place(folder: Path, **model: int) -> Path:
    """Write base, rows and recipe into a folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tiny_model(folder / "base", hidden_size=64, **model)
    draw = random.Random(0)
    with (folder / "rows.jsonl").open("w") as file:
        for _ in range(NUM_ROWS):
            words = [draw.choice(["red", "blue", "cat", "dog", "house", "water"]) for _ in range(draw.randrange(1, 9))]
            file.write(json.dumps({"instruction": " ".join(words), "output": " ".join(reversed(words))}) + "\n")
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def adapter_of(run_dir: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(run_dir / "adapter" / "adapter_model.safetensors")


def largest_difference(one: dict, other: dict) -> float:
    assert one.keys() == other.keys() and one
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def summary_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "run_summary.json").read_text())


def events_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses_of(run_dir: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events_of(run_dir) if "loss" in event}


def steps_saved(run_dir: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in (run_dir / "checkpoints").glob("checkpoint-*"))
