"""Run folders written by hand: what a run leaves, in whatever state a test wants it."""

import json
from pathlib import Path

RECIPE = "model: {name_or_path: base}\ndata: {path: rows.jsonl}\ntraining: {learning_rate: 0.001}\n"


def step(number, **values):
    return {
        "step": number,
        "loss": 5.0 - number / 10,
        "learning_rate": 1e-3,
        "grad_norm": 1.0,
        "seconds": 1.0,
        **values,
    }


def held_out(number, loss):
    return {"step": number, "eval_loss": loss, "eval_token_accuracy": 0.5, "seconds": 1.0}


def write_run(folder: Path, events=(), status="completed", recipe=RECIPE, rows=None, **summary) -> Path:
    """Write the files that a report reads and return the folder."""
    folder.mkdir(parents=True)
    (folder / "run_summary.json").write_text(json.dumps({"status": status, **summary}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "recipe.yaml").write_text(recipe)
    if rows is not None:
        (folder / "rows.json").write_text(json.dumps(rows))
    return folder
