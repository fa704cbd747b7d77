"""Rows per optimizer step: declared once, derived exactly for any number of processes, or refused."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tunebook.errors import Problem
from tunebook.plan.randomness import random_settings
from tunebook.recipe.schema import Recipe
from tunebook.recipe.upstream import training_keys
from tunebook.recipe.values import nearest_divisors

# The largest micro-batch chosen when a recipe gives only the global batch: TrainingArguments' own default.
LARGEST_CHOSEN_MICRO_BATCH = 8
# Where a number comes from that stands in for `auto` until a run measures (training/choosing.py).
DECIDED_AT_START = "auto: measured at the start of the run, which decides"


@dataclass(frozen=True)
class Batches:
    """Global batch = processes x micro-batch x accumulation, and where each factor came from."""

    whole: int
    micro: int
    accumulation: int
    origins: Mapping[str, str]


def counted(number: int, what: str) -> str:
    """Return a number with its noun: `1 row`, `2 rows`, `4 processes`."""
    return f"{number:,} {what if number == 1 else what + ('es' if what.endswith('s') else 's')}"


def count_held_out(num_rows: int, fraction: float) -> int:
    """Return how many of `num_rows` are held out: the nearest whole number, but at least one row on each side.

    `num_rows` must be at least 2 where `fraction` is above 0.
    """
    if fraction == 0:
        return 0
    assert num_rows >= 2, "a split needs a row on each side"
    return min(max(1, round(fraction * num_rows)), num_rows - 1)


def derive_batches(recipe: Recipe, num_processes: int, problems: list[Problem]) -> Batches | None:
    """Return the batch arithmetic of a recipe on `num_processes`, or None after adding the reason to `problems`.

    With `global_batch_size` accumulation is derived and the batch is the same in every world; without it the batch is
    micro-batch x accumulation x processes, as TrainingArguments has it.
    """
    whole = recipe.batch.global_batch_size
    micro = None if recipe.chooses_micro_batch else recipe.arguments.get("per_device_train_batch_size")
    if whole is None:
        micro_origin = _said(recipe, "per_device_train_batch_size")
        micro = micro or training_keys()["per_device_train_batch_size"].default
        accumulation = recipe.arguments.get("gradient_accumulation_steps", 1)
        origins = {
            "global_batch_size": " x ".join(
                (counted(num_processes, "process"), counted(micro, "row"), counted(accumulation, "micro-step"))
            ),
            "per_device_train_batch_size": micro_origin,
            "gradient_accumulation_steps": _said(recipe, "gradient_accumulation_steps"),
        }
        return Batches(num_processes * micro * accumulation, micro, accumulation, origins)
    origin = "chosen: it divides the batch" if micro is None else _said(recipe, "per_device_train_batch_size")
    if micro is None:
        share = whole // num_processes if whole % num_processes == 0 else 1
        micro = max(size for size in range(1, LARGEST_CHOSEN_MICRO_BATCH + 1) if share % size == 0)
    problems += _find_random(recipe)
    if whole % (num_processes * micro):
        problems.append(_indivisible(recipe, whole, micro, num_processes))
        return None
    accumulation = whole // (num_processes * micro)
    origins = {
        "global_batch_size": _said(recipe, "global_batch_size"),
        "per_device_train_batch_size": DECIDED_AT_START if recipe.chooses_micro_batch else origin,
        "gradient_accumulation_steps": f"{whole} / ({counted(num_processes, 'process')} x {counted(micro, 'row')})",
    }
    return Batches(whole, micro, accumulation, origins)


def _find_random(recipe: Recipe) -> list[Problem]:
    """Return why the micro-batch of this recipe cannot be left to the program: with it the result would change."""
    drawn = " and ".join(random_settings(recipe)) if recipe.chooses_micro_batch else ""
    message = f"auto would change the result: {drawn} draws other numbers in each micro-batch"
    fix = "Give a number, or draw none"
    return [Problem(message, fix, recipe.path, "training.per_device_train_batch_size")] if drawn else []


def _indivisible(recipe: Recipe, whole: int, micro: int, num_processes: int) -> Problem:
    step = num_processes * micro
    fixes = []
    if whole % num_processes == 0:
        [near] = nearest_divisors(whole // num_processes, micro, 1)
        fixes.append(f"per_device_train_batch_size={near}")
    fixes += [
        f"global_batch_size={size}" for size in sorted({max(whole // step, 1) * step, (whole // step + 1) * step})
    ]
    if whole % micro == 0:
        worlds = nearest_divisors(whole // micro, num_processes, 2)
        fixes.append(f"{' or '.join(map(str, worlds))} {'process' if worlds == [1] else 'processes'}")
    share = f"{counted(num_processes, 'process')} x {counted(micro, 'row')}"
    message = f"{whole} rows are no whole number of micro-steps of {share}"
    return Problem(message, f"Use {', or '.join(fixes)}", recipe.path, "training.global_batch_size")


def scale_learning_rate(recipe: Recipe, rate: float, num_processes: int) -> tuple[float, str]:
    """Return the learning rate for `num_processes` and the arithmetic, "" where nothing scales.

    linear: rate x N / N_base (Goyal et al. 2017, for large-batch SGD); sqrt: rate x sqrt(N / N_base), which suits
    Adam better (Malladi et al. 2022). Only a batch that grows with the world scales.
    """
    kind, base = recipe.batch.learning_rate_scaling, recipe.batch.learning_rate_base_processes
    if kind == "none":
        return rate, ""
    ratio = num_processes / base
    scaled = rate * (ratio if kind == "linear" else math.sqrt(ratio))
    factor = f"{num_processes} / {base} processes"
    return scaled, f"{rate:g} x {factor if kind == 'linear' else f'sqrt({factor})'}"


def _said(recipe: Recipe, name: str) -> str:
    key = f"training.{name}"
    if key in recipe.overridden:
        return "command line"
    given = name in recipe.arguments or name in recipe.batch.model_fields_set
    return "recipe" if given else "default of TrainingArguments"
