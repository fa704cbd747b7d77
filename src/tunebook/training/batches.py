"""Which rows make each optimizer step, and how they become tensors.

The rows of a global batch depend on seed, epoch and step alone. How they are laid on processes and micro-steps depends
on the world and on their lengths; it changes padding and speed, but not the gradient.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.trainer_pt_utils import BatchRebalanceSampler

from tunebook.errors import Problem, Refused

IGNORED_LABEL = -100
# Stands for no row: two tokens without a label, so its loss is 0, its gradient 0 and nothing is divided by zero.
FILLER_ROW = -1
FILLER = {"input_ids": [0, 0], "labels": [IGNORED_LABEL, IGNORED_LABEL]}


def epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    """Return the order in which one epoch takes the rows: a permutation that depends on the arguments alone.

    Seed and epoch are hashed together, so that epoch 1 of one seed is not epoch 0 of the next.
    """
    digest = hashlib.sha256(f"{seed},{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
    order: list[int] = torch.randperm(num_rows, generator=generator).tolist()
    return order


@dataclass(frozen=True)
class BatchLayout:
    """How a global batch is laid on processes and micro-steps, and which process asks.

    `packed` says that the rows of a micro-batch are joined, so that it costs the sum of their lengths.
    """

    global_batch_size: int
    num_processes: int = 1
    gradient_accumulation_steps: int = 1
    rank: int = 0
    packed: bool = False


class GlobalBatchSampler(BatchRebalanceSampler):  # type: ignore[misc]
    """Yields the row numbers of each micro-batch of this process, one global batch after another.

    Every row comes exactly once per epoch. Inside a global batch rows are grouped by length with transformers' cost
    model, so micro-batches differ in rows and are alike in cost. Where a tail has fewer rows than there are
    (process, micro-step) places, the other places get FILLER_ROW, which upstream fills by repeating rows.

    The order of an epoch follows from its number, never from how often the sampler was iterated: `set_epoch` must be
    called before each epoch. To iterate without it is an error, where torch's sampler repeats the last order.
    """

    def __init__(self, lengths: Sequence[int], layout: BatchLayout, seed: int, drop_last: bool = False) -> None:
        super().__init__(
            lengths=list(lengths),
            effective_batch_size=layout.global_batch_size,
            dp_size=layout.num_processes,
            grad_accum=layout.gradient_accumulation_steps,
            rank=layout.rank,
            seed=seed,
            drop_last=drop_last,
        )
        self._packed = layout.packed
        self._is_epoch_set = False

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch is iterated next."""
        super().set_epoch(epoch)
        self._is_epoch_set = True

    def rows_of_steps(self) -> Iterator[list[int]]:
        """Yield the row numbers of each global batch of the current epoch, over all processes."""
        order = epoch_order(len(self.lengths), self.seed, self.epoch)
        for step in range(self.num_global_batches):
            yield order[step * self.effective_batch_size : (step + 1) * self.effective_batch_size]

    def __iter__(self) -> Iterator[list[int]]:
        # Runs with the first batch taken: a DataLoader with workers makes two iterators and uses one.
        assert self._is_epoch_set, "set_epoch comes before each epoch; without it this one would repeat the last order"
        self._is_epoch_set = False
        num_places = self.dp_size * self.grad_accum
        for real_rows in self.rows_of_steps():
            rows = real_rows + [FILLER_ROW] * (num_places - len(real_rows))
            lengths = [len(FILLER["labels"]) if row == FILLER_ROW else self.lengths[row] for row in rows]
            yield from self._assign(rows, lengths)[self.rank]

    def _group_cost(self, group: Sequence[tuple[int, int]]) -> float:
        """Return the cost of (row, length) pairs in one micro-batch: upstream's, which pads, or their tokens if packed.

        The part of attention that grows with the square only widens the gaps between sums, so equal sums balance it.
        """
        return float(sum(length for _, length in group)) if self._packed else super()._group_cost(group)


def build_train_batches(
    lengths: Sequence[int], layout: BatchLayout, seed: int, drop_last: bool = False
) -> GlobalBatchSampler:
    """Return the sampler of the training rows; refuse `dataloader_drop_last` where it would leave no step at all."""
    if drop_last and len(lengths) < layout.global_batch_size:
        message = (
            f"{len(lengths)} training rows < global batch of {layout.global_batch_size}: every row would be dropped"
        )
        fix = f"Set it to false, or the global batch to at most {len(lengths)}"
        raise Refused(Problem(message, fix, key="training.dataloader_drop_last"))
    return GlobalBatchSampler(lengths, layout, seed, drop_last)


def eval_batches(num_rows: int, batch_size: int, num_processes: int = 1, rank: int = 0) -> list[list[int]]:
    """Return the row numbers of each evaluation batch of this process, in order, each row on exactly one process.

    All processes get the same number of batches, by FILLER_ROW where rows don't divide.
    """
    rows = list(range(rank, num_rows, num_processes))
    rows += [FILLER_ROW] * (math.ceil(num_rows / num_processes) - len(rows))
    return [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]


class Rows(torch.utils.data.Dataset):  # type: ignore[misc]
    """Prepared rows (columns input_ids and labels) by number, with FILLER_ROW for a row that trains nothing."""

    def __init__(self, prepared: Any) -> None:
        self._prepared = prepared.select_columns(["input_ids", "labels"])

    def __len__(self) -> int:
        return len(self._prepared)

    def __getitem__(self, row: int) -> dict[str, list[int]]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: list[int]) -> list[dict[str, list[int]]]:
        """Return several rows at once, in the order asked for: what torch's DataLoader calls per micro-batch."""
        columns = self._prepared[[row for row in rows if row != FILLER_ROW]] if set(rows) != {FILLER_ROW} else {}
        real = iter([dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)])
        return [FILLER if row == FILLER_ROW else next(real) for row in rows]


def pad_right(rows: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
    """Make one micro-batch of rows, padded on the right to the longest of them.

    Padding is known by its position, never by an id, so the id it has (0) says nothing.
    Returns int64 tensors of shape (rows, tokens) `input_ids`, `attention_mask` (1 for a token of a row) and `labels`
    (-100 where nothing is trained), what `find_targets` says of the labels as `targets`, and the plain numbers
    `num_rows`, `num_row_tokens` (without padding and fillers) and `num_trained_tokens` (labels that are a target: those
    after the first position of a row).
    """
    shape = (len(rows), max(len(row["input_ids"]) for row in rows))
    input_ids = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORED_LABEL)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    for place, row in enumerate(rows):
        length = len(row["input_ids"])
        input_ids[place, :length] = torch.tensor(row["input_ids"])
        labels[place, :length] = torch.tensor(row["labels"])
        attention_mask[place, :length] = 1
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "labels": labels,
        "targets": find_targets(labels),
        "num_rows": len(rows),
        "num_row_tokens": sum(len(row["input_ids"]) for row in rows if row != FILLER),
        "num_trained_tokens": int(labels[:, 1:].ne(IGNORED_LABEL).sum()),
    }


def join_rows(rows: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
    """Make one micro-batch of rows, joined one after another to a single sequence without padding (`data.packing`).

    Positions start again with each row; that, with no attention mask and no cache, is what keeps the rows apart
    (`check_rows_apart`). The first label of a row is -100: the last token of the row before would be asked for it.
    Fillers are left out where there is a row. Returns int64 tensors of shape (1, tokens) `input_ids`, `labels` and
    `position_ids`, for which a single row has an `attention_mask` of ones: it needs no mask to keep it apart. The rest
    is that of `pad_right`.
    """
    real = [row for row in rows if row != FILLER]
    joined = real or [FILLER]
    lengths = [len(row["input_ids"]) for row in joined]
    labels = torch.tensor([[label for row in joined for label in (IGNORED_LABEL, *row["labels"][1:])]])
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {
        "input_ids": torch.tensor([[token for row in joined for token in row["input_ids"]]]),
        **({"position_ids": positions} if len(joined) > 1 else {"attention_mask": torch.ones_like(labels)}),
        "labels": labels,
        "targets": find_targets(labels),
        "num_rows": len(real),
        "num_row_tokens": sum(lengths) if real else 0,
        "num_trained_tokens": int(labels.ne(IGNORED_LABEL).sum()),
    }


def find_targets(labels: Any) -> dict[str, Any]:
    """Return where a label comes next and which: int64 tensors `positions`, counted through the rows, and `ids`.

    Looked for here, while the labels are on the CPU: a GPU would have to be waited for. Where no label counts it is one
    position with -100, so that nothing is empty and the loss is 0.
    """
    rows, columns = labels[:, 1:].ne(IGNORED_LABEL).nonzero(as_tuple=True)
    if not len(rows):
        return {"positions": torch.tensor([0]), "ids": torch.tensor([IGNORED_LABEL])}
    return {"positions": rows * labels.shape[1] + columns, "ids": labels[rows, columns + 1]}


def tensors_of(micro_batch: Mapping[str, Any], device: str | None = None) -> dict[str, Any]:
    """Return what a model takes of a micro-batch: its tensors without the rest, on `device` where one is given."""
    tensors = {name: value for name, value in micro_batch.items() if isinstance(value, torch.Tensor)}
    if device is None:
        return tensors
    return {name: value.to(device, non_blocking=True) for name, value in tensors.items()}
