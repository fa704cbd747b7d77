"""What the batches of a run cost in padding, from the lengths of its rows alone, against batches drawn at random."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from tunebook.plan.plan import Plan
from tunebook.recipe.schema import Recipe
from tunebook.training.batches import FILLER_ROW, BatchLayout, GlobalBatchSampler, epoch_order

# Steps that are laid out to measure: of 64 rows, more than all of 100,000 rows.
MOST_STEPS = 2000
# Steps that are laid out to choose by: the first tell what is usual, those with the longest rows what is the fullest.
USUAL_STEPS, LONGEST_STEPS = 100, 50


@dataclass(frozen=True)
class Padding:
    """Shares of positions that hold no token, in the first epoch: as laid out, and with rows in random order.

    `fullest` is the micro-batch with the most positions, as rows and tokens of the longest row.
    """

    share: float
    random_share: float
    fullest: tuple[int, int]
    tokens_per_step: float
    num_steps: int

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for --json."""
        return asdict(self)


class WholeLayout(GlobalBatchSampler):
    """Yields the micro-batches of all processes, one global batch after another."""

    def _assign(self, indices: list[int], lengths: list[int]) -> list[list[list[int]]]:
        return [[rows for process in super()._assign(indices, lengths) for rows in process]]


def measure_padding(recipe: Recipe, plan: Plan, lengths: Sequence[int]) -> Padding:
    """Return the padding of the run's own sampler, and of random micro-batches of as many rows each.

    Where the recipe packs, the rows of a micro-batch are joined, which leaves no padding.
    """
    packed, seed = recipe.data.packing, recipe.data_seed
    layout = BatchLayout(plan.global_batch_size, plan.world_size, plan.gradient_accumulation_steps, packed=packed)
    micro_batch = plan.per_device_train_batch_size
    sampler = WholeLayout(lengths, layout, seed)
    sampler.set_epoch(0)
    num_steps = min(sampler.num_global_batches, MOST_STEPS)
    places = layout.num_processes * layout.gradient_accumulation_steps
    laid_out = [[lengths[row] for row in rows if row != FILLER_ROW] for rows in islice(sampler, num_steps * places)]
    real = [rows for rows in laid_out if rows]
    order = epoch_order(len(lengths), seed, 0)[: num_steps * layout.global_batch_size]
    drawn = [lengths[row] for row in order]
    at_random = [drawn[start : start + micro_batch] for start in range(0, len(drawn), micro_batch)]
    positions = [sum(rows) if packed else len(rows) * max(rows) for rows in real]
    fullest = max(range(len(real)), key=positions.__getitem__)
    rows = real[fullest]
    return Padding(
        share=1 - sum(map(sum, real)) / sum(positions),
        random_share=1 - sum(drawn) / sum(len(rows) * max(rows) for rows in at_random),
        fullest=(1, sum(rows)) if packed else (len(rows), max(rows)),
        tokens_per_step=sum(positions) / num_steps,
        num_steps=num_steps,
    )


@dataclass(frozen=True)
class Layout:
    """Micro-batches of one size as the run will have them, by row numbers, and the mean positions of a step.

    `shape` are rows and tokens of the longest of the `fullest`, and `usual_share` the positions of the `usual` one in
    those of a mean micro-batch. A step of a process has `num_micro_batches`.
    """

    fullest: tuple[int, ...]
    shape: tuple[int, int]
    usual: tuple[int, ...]
    usual_share: float
    positions: float
    num_micro_batches: int


def find_steps(recipe: Recipe, plan: Plan, lengths: Sequence[int]) -> list[list[int]]:
    """Return the rows of the first steps, and of the steps with the longest rows, or of most tokens if rows are joined.

    Rows that are joined make a micro-batch as long as they are together.
    """
    order, whole = epoch_order(len(lengths), recipe.data_seed, 0), plan.global_batch_size
    steps = [order[start : start + whole] for start in range(0, len(order), whole)]
    usual, others = steps[:USUAL_STEPS], steps[USUAL_STEPS:]
    size_of = sum if recipe.data.packing else max
    return usual + sorted(others, key=lambda rows: size_of(lengths[row] for row in rows))[-LONGEST_STEPS:]


class _Steps(WholeLayout):
    """Lays out some steps only."""

    steps: Sequence[list[int]] = ()

    def rows_of_steps(self) -> Iterator[list[int]]:
        yield from self.steps


def lay_out(recipe: Recipe, plan: Plan, lengths: Sequence[int], steps: Sequence[list[int]]) -> Layout:
    """Return the micro-batches of a plan, from `steps` given as the rows of each, the usual ones first."""
    packed = recipe.data.packing
    layout = BatchLayout(plan.global_batch_size, plan.world_size, plan.gradient_accumulation_steps, packed=packed)
    sampler: Any = _Steps(lengths, layout, recipe.data_seed)
    sampler.steps = steps
    sampler.set_epoch(0)
    real = [[row for row in rows if row != FILLER_ROW] for rows in sampler]
    of_usual = min(len(steps), USUAL_STEPS) * layout.num_processes * layout.gradient_accumulation_steps
    tokens = [[lengths[row] for row in rows] for rows in real]
    sizes = [(1, sum(one)) if packed else (len(one), max(one, default=0)) for one in tokens]
    positions = [rows * length for rows, length in sizes]
    fullest = max(range(len(real)), key=positions.__getitem__)
    mean = sum(positions[:of_usual]) / of_usual
    usual = min((place for place in range(of_usual) if real[place]), key=lambda place: abs(positions[place] - mean))
    return Layout(
        fullest=tuple(real[fullest]),
        shape=sizes[fullest],
        usual=tuple(real[usual]),
        usual_share=positions[usual] / mean,
        positions=mean * of_usual / min(len(steps), USUAL_STEPS),
        num_micro_batches=plan.gradient_accumulation_steps,
    )
