"""Receipts: what was measured when a recipe was run, kept beside it as recipes/NAME.receipt.json.

One entry for each kind of hardware, number of processes and values on the command line. Its band is where the loss of
the recipe lies at each part of the run, over several seeds: a later run that leaves it was not the recipe's.
"""

import json
import math
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from tunebook.errors import Problem, Refused
from tunebook.plan.durations import find_gpu
from tunebook.plan.plan import Plan
from tunebook.recipe.schema import Recipe
from tunebook.runs.folder import read_begun
from tunebook.runs.identity import recipe_identity, taken_over
from tunebook.runs.lock import one_at_a_time
from tunebook.runs.past import PastRun
from tunebook.system.places import is_local
from tunebook.system.writing import write_whole

Entry = dict[str, Any]
Curve = Sequence[tuple[int, float]]  # (step, loss) for each log, in order
Positive = Annotated[FiniteFloat, Field(gt=0)]
NUM_PARTS = 10
# How far beyond the seeds a loss may lie: so many times as far as they are apart, and at least so much of it. Where
# losses are normal, about one run in twenty, or fewer, leaves a band of three seeds by chance (tests/test_receipts.py).
MARGIN, LEAST_MARGIN = 2, 0.02
# Fewer seeds than these say nothing of another one.
ENOUGH_SEEDS = 3
# A run at less than this part of the receipt's speed, with the same TIMED_SETTINGS, hardware and processes, is worth a
# word.
SLOW = 0.7
SEED = "training.seed"
# Of what a result depends on, the time of a step does not depend on these, and a plan without data does not know the
# last three. A key that is not here counts.
UNTIMED = frozenset({
    *(f"training.{name}" for name in (
        "learning_rate", "num_train_epochs", "max_steps", "seed", "data_seed", "warmup_steps",
        "lr_scheduler_type", "lr_scheduler_kwargs", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
        "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
    )),
    "data.deduplicate", "data.validation", "data", "tokenizer", "base model",
})  # fmt: skip
# What changes no result, and the time of a step.
TIMED_SETTINGS = (
    *(f"training.{name}" for name in (
        "per_device_train_batch_size", "activation_checkpointing", "activation_checkpointing_kwargs", "fused_loss",
        "dataloader_num_workers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "torch_empty_cache_steps",
    )),
    "data.packing",
    "data.path",
)  # fmt: skip


def receipt_path(recipe_path: str) -> Path:
    """Return where the receipt of a recipe is, or would be."""
    return Path(recipe_path).with_suffix(".receipt.json")


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Part(_Strict):
    steps: tuple[int, int]
    loss: tuple[FiniteFloat, FiniteFloat]


class _Speeds(_Strict):
    median: Positive


class _Entry(_Strict):
    """All that is read of an entry."""

    date: str
    hardware: str
    device: str
    num_processes: int
    seeds: list[int]
    seconds_per_step: Positive
    tokens_per_second: _Speeds
    loss_band: list[_Part]
    identity: dict[str, Any]
    settings: dict[str, Any] | None = None


class _Receipt(_Strict):
    measured: list[_Entry]


def read_receipt(path: Path) -> list[Entry]:
    """Return the entries of a receipt, none where there is none. Raises Refused where the file holds something else."""
    try:
        read = _Receipt.model_validate_json(path.read_text(encoding="utf-8"))
        return [entry.model_dump(mode="json") for entry in read.measured]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        fix = "Delete it; `tunebook bench` writes it anew"
        raise Refused(Problem("is no receipt that can be read", fix, str(path))) from error


def write_receipt(path: Path, entry: Entry) -> None:
    """Add an entry, in place of earlier ones of the same hardware and processes; whole or not at all.

    A trial, with values from the command line, replaces none but an earlier trial of those values. Of several that are
    written in the same moment each is kept.
    """
    with one_at_a_time(path.resolve().parent):
        others = [one for one in read_receipt(path) if not _is_replaced(one, entry)]
        in_order = sorted([*others, entry], key=lambda one: bool(one.get("trial")))  # the first that fits is asked
        write_whole(path, json.dumps({"measured": in_order}, indent=1) + "\n")


def build_entry(runs: Sequence[PastRun], seeds: Sequence[int], trial: bool = False) -> Entry:
    """Return what runs of one recipe measured, one for each seed; in a `trial` they had other values than its own."""
    first = runs[0].summary
    begun = read_begun(str(runs[0].folder))
    assert begun is not None, "a completed run says what it began with"
    speeds = sorted(float(run.summary["tokens_per_second"]) for run in runs)
    steps = int(first["num_optimizer_steps"])
    return {
        "date": date.today().isoformat(),
        "trial": trial,
        "hardware": first["hardware"],
        "device": first["device"],
        "num_processes": first["world_size"],
        "seeds": list(seeds),
        "num_optimizer_steps": steps,
        "seconds_per_step": round(median(float(run.summary["training_seconds"]) for run in runs) / steps, 4),
        "tokens_per_second": {"median": round(median(speeds), 1), "least": speeds[0], "most": speeds[-1]},
        "peak_memory_bytes": max((run.summary["peak_memory_bytes"] or 0 for run in runs), default=0) or None,
        "eval_loss_before": [run.summary["eval_loss_before"] for run in runs],
        "eval_loss": [run.summary["eval_loss"] for run in runs],
        "loss_band": loss_band([run.curve("loss") for run in runs]),
        "identity": _without_seed(begun.identity),
        "settings": _timed_settings(begun.settings),
        "versions": dict(first["versions"]),
    }


def loss_band(curves: Sequence[Curve]) -> list[Entry]:
    """Return the band of parts of a run: the mean losses of all curves there, and a margin.

    The margin is MARGIN times as wide as the losses lie apart, there or in all parts (the root of the mean square, as a
    share of the loss), whichever is more: three seeds are close together in some part of a run by chance. All curves
    have the same steps. There are at most NUM_PARTS parts, of equally many logged losses each; the first begins at
    step 1.
    """
    covered = _covered(curves[0])
    size = -(-len(covered) // NUM_PARTS) or 1
    parts = []
    for part in (covered[start : start + size] for start in range(0, len(covered), size)):
        start, end = part[0][0], part[-1][1]
        losses = [loss for curve in curves if (loss := mean_loss(curve, start, end)) is not None]
        parts.append((start, end, min(losses), max(losses)))
    usual = math.sqrt(sum((1 - least / most) ** 2 for *_, least, most in parts if most > 0) / max(1, len(parts)))
    band = []
    for start, end, least, most in parts:
        margin = max(MARGIN * (most - least), MARGIN * usual * most, LEAST_MARGIN * most)
        band.append({"steps": [start, end], "loss": [least - margin, most + margin]})
    return band


def mean_loss(curve: Curve, start: int, end: int) -> float | None:
    """Return the mean loss of the steps `start` to `end`, whatever steps were logged; None where those leave it open.

    That is where a logged loss covers steps both inside and outside.
    """
    inside = [one for one in _covered(curve) if start <= one[0] <= one[1] <= end]
    if not inside or (inside[0][0], inside[-1][1]) != (start, end):
        return None
    return sum(loss * (last - first + 1) for first, last, loss in inside) / (end - start + 1)


def _covered(curve: Curve) -> list[tuple[int, int, float]]:
    """Return the first and the last step that each logged loss is the mean of, and the loss.

    It is the mean over the steps since the last log, each with the same weight (Trainer._maybe_log_save_evaluate in
    transformers 5.24 divides the sum by their number; train_ddp.py does the same).
    """
    befores = [0, *(step for step, _ in curve)]
    return [(before + 1, step, loss) for before, (step, loss) in zip(befores, curve, strict=False)]


def compare_with_receipt(path: Path, run: PastRun) -> list[str]:
    """Return a note for each way in which a completed run is not what the receipt of its recipe promises.

    None where the receipt is of other values, data or base, and none of the loss where the run's seed is none of the
    receipt's and these are fewer than ENOUGH_SEEDS: then it says nothing about this run.
    """
    begun = read_begun(str(run.folder))
    if begun is None:
        return []
    same = [one for one in read_receipt(path) if one["identity"] == _without_seed(begun.identity)]
    here = (run.summary.get("hardware"), run.summary.get("world_size"))
    same.sort(key=lambda one: _place(one) != here)
    if not same:
        return []
    settings = _timed_settings(begun.settings)
    timed = [one for one in same if _place(one) == here and _timed_settings(one.get("settings") or {}) == settings]
    seed = begun.identity.get(SEED)
    known = [one for one in same if seed in one["seeds"] or len(one["seeds"]) >= ENOUGH_SEEDS]
    return [
        *(_out_of_band(known[0], run, path) if known else []),
        *(_too_slow(timed[0], run, path) if timed else []),
    ]


def find_step_seconds(recipe: Recipe, plan: Plan, gpu: str | None) -> tuple[float, str] | None:
    """Return the seconds of a step by the receipt of a recipe and where they come from, or None.

    An entry serves where it was measured on such devices and processes with the values that time depends on; on the GPU
    of the name that is asked about, where one is.
    """
    path, asked, now = receipt_path(recipe.path), _timed(recipe_identity(recipe, plan)), taken_over(recipe, plan)
    settings = _timed_settings(now)
    for entry in read_receipt(path):
        measured, on = entry["identity"], str(entry["hardware"])
        same = (entry["device"], entry["num_processes"]) == (plan.device_type, plan.world_size)
        same &= _timed(measured) == asked and _timed_settings(entry.get("settings") or {}) == settings
        same &= _is_base(str(measured.get("base model", "")), recipe.model.name_or_path)
        if same and (gpu is None or find_gpu(on) == gpu.strip().lower()):
            return float(entry["seconds_per_step"]), f"measured on {on} ({path}, {entry['date']})"
    return None


def _timed(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in identity.items() if key not in UNTIMED}


def _timed_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: settings.get(name) for name in TIMED_SETTINGS}


def _is_base(base: str, name: str) -> bool:
    """Whether a run's base may be the model of this name; that of a folder is known by a hash, which takes reading."""
    return is_local(name) or base.startswith(f"{name}@")


def _out_of_band(entry: Entry, run: PastRun, path: Path) -> list[str]:
    curve = run.curve("loss")
    for part in entry["loss_band"]:
        (start, end), (low, high) = part["steps"], part["loss"]
        loss = mean_loss(curve, start, end)
        if loss is not None and not low <= loss <= high:
            return [
                f"the loss of steps {start} to {end} is {loss:.4f}, out of the band of {path}: {low:.4f} to {high:.4f}"
            ]
    return []


def _too_slow(entry: Entry, run: PastRun, path: Path) -> list[str]:
    speed, promised = run.summary.get("tokens_per_second"), entry["tokens_per_second"]["median"]
    if not isinstance(speed, float) or speed >= SLOW * promised:
        return []
    return [f"{speed:,.0f} trained tokens per second, where {path} has {promised:,.0f} on the same hardware"]


def _is_replaced(earlier: Entry, entry: Entry) -> bool:
    if _place(earlier) != _place(entry):
        return False
    return not entry.get("trial") or all(
        earlier.get(key) == entry.get(key) for key in ("trial", "identity", "settings")
    )


def _place(entry: Mapping[str, Any]) -> tuple[Any, Any]:
    return entry["hardware"], entry["num_processes"]


def _without_seed(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in identity.items() if key != SEED}
