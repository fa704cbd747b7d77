"""What `auto` may choose: the micro-batches that keep the global batch, with activation checkpointing and without.

Neither changes the result. Which of them fit is told by the memory plan on the run's own fullest micro-batch; which
seem fast, by the positions that a process computes and the times that it starts anew.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from tunebook.errors import Problem
from tunebook.model.shapes import ModelShape
from tunebook.plan.memory import GIB
from tunebook.plan.memory_plan import TIGHT, find_sizes, full_micro_batch, plan_memory, with_micro_batch
from tunebook.plan.plan import Plan
from tunebook.recipe.schema import Recipe

if TYPE_CHECKING:
    from tunebook.plan.padding import Layout

# A micro-batch size is looked at where it is so much larger than the one before: 12 of the 60 divisors of 5,040.
LARGER_BY: Final = 1.5
# Forward, and backward at twice its cost; checkpointing repeats the forward.
PASSES: Final = {False: 3, True: 4}
# Positions in whose time a micro-batch is started, layer by layer. Only the order of what is measured depends on it.
STARTING: Final = {"cuda": 1024, "cpu": 32}


@dataclass(frozen=True)
class Candidate:
    """A setting: its layout (None where the rows are not known), and the predicted bytes of a process (None: unknown).

    `cost` is in positions that one process passes through the model in a step; it only says what to measure first.
    """

    micro_batch: int
    checkpointing: bool
    needed: int | None
    cost: float
    layout: "Layout | None" = None

    @property
    def name(self) -> str:
        """The setting in words."""
        return f"micro-batch {self.micro_batch}, activation checkpointing {'on' if self.checkpointing else 'off'}"

    def planned(self, recipe: Recipe, plan: Plan) -> Plan:
        """Return the plan with this setting."""
        if recipe.chooses_micro_batch:
            plan = with_micro_batch(recipe, plan, self.micro_batch)
            rows = f"{plan.global_batch_size} / ({plan.world_size} x {self.micro_batch})"
            plan = replace(plan, origins={**plan.origins, "gradient_accumulation_steps": rows})
        return replace(plan, activation_checkpointing=self.checkpointing)


def find_candidates(
    recipe: Recipe, plan: Plan, shape: ModelShape | None, lengths: Sequence[int] | None, gpu_gib: float | None = None
) -> list[Candidate]:
    """Return every setting that the recipe leaves open, most promising first.

    `lengths` are those of the training rows; without them every row is as long as data.max_length. `gpu_gib` stands for
    a GPU that is only asked about.
    """
    sizes = thin(find_sizes(recipe, plan)) if recipe.chooses_micro_batch else [plan.per_device_train_batch_size]
    ways = (False, True) if recipe.chooses_checkpointing else (plan.activation_checkpointing,)
    lay_out = None if lengths is None else _layouts(recipe, plan, lengths)
    starting = STARTING[plan.device_type if gpu_gib is None else "cuda"]
    found = []
    for size in sizes:
        there = with_micro_batch(recipe, plan, size) if recipe.chooses_micro_batch else plan
        layout = None if lay_out is None else lay_out(there)
        positions = float(plan.global_batch_size * plan.max_length) if layout is None else layout.positions
        fullest = full_micro_batch(recipe, plan, size) if layout is None else layout.shape
        bytes_of = _predict(recipe, there, shape, fullest, gpu_gib, 0 if lengths is None else max(lengths))
        starts = starting * plan.world_size * there.gradient_accumulation_steps
        found += [
            Candidate(size, way, bytes_of.get(way), PASSES[way] * (positions + starts) / plan.world_size, layout)
            for way in ways
        ]
    return sorted(found, key=lambda one: one.cost)


def keep_fitting(candidates: Sequence[Candidate], limit: int) -> list[Candidate]:
    """Return those that fit in `limit` bytes with something to spare, or the smallest one where it fits at all.

    Empty where none does. Those whose need is not known are kept.
    """
    fitting = [one for one in candidates if one.needed is None or one.needed <= TIGHT * limit]
    smallest = min(candidates, key=lambda one: one.needed or 0)
    return fitting or [one for one in (smallest,) if (one.needed or 0) <= limit]


def explain_no_fit(candidates: Sequence[Candidate], limit: int, whose: str) -> Problem:
    """Return what refuses a run of which no setting fits."""
    smallest = min(candidates, key=lambda one: one.needed or 0)
    message = f"auto finds nothing that fits: {smallest.name} needs {(smallest.needed or 0) / GIB:.2f} GiB, and "
    fix = "Set a smaller data.max_length, or take a smaller model or more memory"
    return Problem(f"{message}{limit / GIB:.2f} GiB are {whose}", fix, key="training.per_device_train_batch_size")


def choose_by_memory(
    recipe: Recipe, plan: Plan, shape: ModelShape | None, lengths: Sequence[int] | None, gpu_gib: float
) -> Plan:
    """Return the plan with the setting that seems the fastest of those that fit on a GPU; nothing is measured."""
    if shape is None:
        return plan
    candidates = find_candidates(recipe, plan, shape, lengths, gpu_gib)
    limit = round(gpu_gib * GIB)
    fitting = keep_fitting(candidates, limit) or [min(candidates, key=lambda one: one.needed or 0)]
    origin = f"auto: by memory alone, for {gpu_gib:g} GiB; the run measures, which decides"
    return say_origin(fitting[0].planned(recipe, plan), recipe, origin)


def say_origin(plan: Plan, recipe: Recipe, origin: str) -> Plan:
    """Return the plan with `origin` as the place that its chosen numbers come from."""
    names = ["per_device_train_batch_size"] if recipe.chooses_micro_batch else []
    names += ["activation_checkpointing"] if recipe.chooses_checkpointing else []
    return replace(plan, origins={**plan.origins, **dict.fromkeys(names, origin)})


def thin(sizes: Sequence[int]) -> list[int]:
    """Return ascending sizes of which each is at least LARGER_BY times the one before."""
    kept: list[int] = []
    for size in sizes:
        if not kept or size >= LARGER_BY * kept[-1]:
            kept.append(size)
    return kept


def _predict(  # noqa: PLR0913, PLR0917 - what the plan of memory takes
    recipe: Recipe,
    plan: Plan,
    shape: ModelShape | None,
    fullest: tuple[int, int],
    gpu_gib: float | None,
    longest: int,
) -> dict[bool, int]:
    if shape is None:
        return {}
    memory = plan_memory(recipe, plan, shape, lambda rows: fullest, gpu_gib, longest)
    return {True: memory.checkpointed.total + memory.context, False: memory.kept.total + memory.context}


def _layouts(recipe: Recipe, plan: Plan, lengths: Sequence[int]) -> Callable[[Plan], "Layout"]:
    from tunebook.plan.padding import find_steps, lay_out  # torch comes with it

    steps = find_steps(recipe, plan, lengths)
    return lambda there: lay_out(recipe, there, lengths, steps)
