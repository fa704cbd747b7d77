"""What a recipe's run takes on the GPUs that people have: the sizes of facts/gpus.json."""

import json
from functools import cache
from importlib.resources import files

from tunebook.model.shapes import ModelShape
from tunebook.plan.memory import GIB
from tunebook.plan.memory_plan import TIGHT, MemoryPlan, plan_memory
from tunebook.plan.plan import Plan
from tunebook.recipe.schema import Recipe


@cache
def load_gpu_sizes() -> tuple[int, ...]:
    """Return the memory of the GPUs known here, in GiB, each size once, smallest first."""
    known = json.loads(files("tunebook").joinpath("facts/gpus.json").read_text(encoding="utf-8"))["gpus"]
    return tuple(sorted({gpu["memory_gib"] for gpu in known.values()}))


def smallest_gpu(memory: MemoryPlan) -> int | None:
    """Return the smallest size in GiB that holds a process with something to spare, or None where none does."""
    return next((size for size in load_gpu_sizes() if memory.needed <= TIGHT * size * GIB), None)


def plan_on_gpus(recipe: Recipe, plan: Plan, shape: ModelShape) -> tuple[MemoryPlan, dict[int, int | None]]:
    """Return the memory of a process as the recipe has it, and the largest micro-batch for each size of GPU.

    Every row is taken to be as long as data.max_length. None: not even one row fits.
    """
    plans = {size: plan_memory(recipe, plan, shape, None, TIGHT * size) for size in load_gpu_sizes()}
    return next(iter(plans.values())), {size: found.largest_rows for size, found in plans.items()}
