"""What the batches of a run cost in padding, from the lengths of its rows alone, against batches drawn at random."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from tunebook.plan import Plan
from tunebook.recipe.schema import Recipe
from tunebook.training.batches import FILLER_ROW, BatchLayout, GlobalBatchSampler, epoch_order

# Steps that are laid out to measure: of 64 rows, more than all of 100,000 rows.
MOST_STEPS = 2000


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
