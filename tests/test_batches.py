"""The rows of each step: functions of seed, epoch and step alone, each row once, whatever the world."""

import random

import datasets
import pytest
import torch
from torch.utils.data import DistributedSampler
from transformers.trainer_pt_utils import BatchRebalanceSampler

from tunebook.errors import Refused
from tunebook.training.batches import (
    FILLER,
    FILLER_ROW,
    BatchLayout,
    GlobalBatchSampler,
    Rows,
    build_train_batches,
    epoch_order,
    eval_batches,
    pad_right,
)

pytestmark = pytest.mark.slow

LAYOUTS = [(1, 1), (1, 4), (2, 1), (2, 4), (4, 2), (8, 1)]


def lengths_of(num_rows: int) -> list[int]:
    draw = random.Random(1)
    return [draw.randrange(2, 200) for _ in range(num_rows)]


def steps_of(num_rows: int, processes: int, micro_steps: int, *, epoch: int = 0, seed: int = 0, whole: int = 8):
    """Return, for each step, the rows of all processes and micro-steps."""
    samplers = [
        GlobalBatchSampler(lengths_of(num_rows), BatchLayout(whole, processes, micro_steps, rank), seed)
        for rank in range(processes)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    by_rank = [list(sampler) for sampler in samplers]
    assert {len(batches) for batches in by_rank} == {len(samplers[0])}
    num_steps = len(samplers[0]) // micro_steps
    return [
        [batch for batches in by_rank for batch in batches[step * micro_steps : (step + 1) * micro_steps]]
        for step in range(num_steps)
    ]


def real(step) -> list[int]:
    return sorted(row for batch in step for row in batch if row != FILLER_ROW)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 9, 21, 64])
def test_rows_of_a_step_are_the_same_in_every_world(num_rows):
    for epoch in (0, 1, 5):
        worlds = [[real(step) for step in steps_of(num_rows, *layout, epoch=epoch)] for layout in LAYOUTS]
        assert all(world == worlds[0] for world in worlds)
        assert sorted(row for step in worlds[0] for row in step) == list(range(num_rows))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_place_has_a_batch_and_fillers_come_only_where_rows_end(layout):
    processes, micro_steps = layout
    for num_rows in (1, 3, 9, 21):
        steps = steps_of(num_rows, *layout)
        assert all(batch for step in steps for batch in step)
        fillers = [row for step in steps for batch in step for row in batch if row == FILLER_ROW]
        tail = num_rows % 8 or 8
        assert len(fillers) == max(processes * micro_steps - tail, 0)
        assert all(FILLER_ROW not in batch for step in steps[:-1] for batch in step)


def test_order_depends_on_seed_and_epoch_and_on_nothing_else():
    assert epoch_order(50, 1, 0) == epoch_order(50, 1, 0)
    orders = [epoch_order(50, seed, epoch) for seed in range(3) for epoch in range(3)]
    # Upstream adds them up: its epoch 1 of seed 0 is epoch 0 of seed 1.
    assert len({tuple(order) for order in orders}) == 9


def test_set_epoch_changes_the_order_and_cannot_be_forgotten():
    sampler = GlobalBatchSampler(lengths_of(20), BatchLayout(8), seed=3)
    with pytest.raises(AssertionError, match="set_epoch"):
        list(sampler)
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
        with pytest.raises(AssertionError, match="set_epoch"):
            next(iter(sampler))
    assert orders[0] == orders[2] != orders[1]


def test_torch_still_repeats_the_order_where_set_epoch_is_forgotten_and_rows_where_they_do_not_divide():
    """What docs/ddp.md says of torch's DistributedSampler; when this fails, it says it no longer."""
    samplers = [DistributedSampler(range(9), num_replicas=2, rank=rank, seed=3) for rank in (0, 1)]
    rows = [row for sampler in samplers for row in sampler]
    assert len(rows) == 10 and len(set(rows)) == 9
    assert list(samplers[0]) == list(samplers[0])
    samplers[0].set_epoch(1)
    assert list(samplers[0]) != list(DistributedSampler(range(9), num_replicas=2, rank=0, seed=3))


def test_long_rows_are_grouped_so_that_padding_is_small():
    lengths = lengths_of(64)
    sampler = GlobalBatchSampler(lengths, BatchLayout(64, 2, 4, 0), seed=0)
    sampler.set_epoch(0)
    batches = list(sampler)
    sizes = [len(batch) for batch in batches]
    costs = [max(lengths[row] for row in batch) * len(batch) for batch in batches]
    assert len(set(sizes)) > 1
    assert max(costs) < 1.5 * min(costs)


def test_drop_last_drops_the_tail_and_is_refused_where_nothing_is_left():
    sampler = build_train_batches(lengths_of(21), BatchLayout(8), 0, drop_last=True)
    sampler.set_epoch(0)
    assert len(list(sampler)) == 2
    with pytest.raises(Refused, match=r"3 training rows < global batch of 4"):
        build_train_batches(lengths_of(3), BatchLayout(4), 0, drop_last=True)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 8, 30])
def test_evaluation_takes_each_row_once_and_in_order(num_rows):
    for processes in (1, 2, 4):
        for batch_size in (1, 3, 8):
            shares = [eval_batches(num_rows, batch_size, processes, rank) for rank in range(processes)]
            assert len({len(batches) for batches in shares}) == 1, "a rank would wait for another"
            rows = [[row for batch in batches for row in batch if row != FILLER_ROW] for batches in shares]
            assert all(share == sorted(share) for share in rows)
            assert sorted(row for share in rows for row in share) == list(range(num_rows))


@pytest.fixture
def prepared():
    rows = [[5, 6, 7], [8, 9], [3, 3, 3, 3]]
    return datasets.Dataset.from_dict(
        {"input_ids": rows, "labels": [[-100, *row[1:]] for row in rows], "length": [len(row) for row in rows]}
    )


def test_rows_come_in_the_order_asked_for_with_fillers_between(prepared):
    rows = Rows(prepared)
    assert len(rows) == 3
    asked = rows.__getitems__([2, FILLER_ROW, 0])
    assert [row["input_ids"] for row in asked] == [[3, 3, 3, 3], FILLER["input_ids"], [5, 6, 7]]
    assert rows.__getitems__([FILLER_ROW]) == [FILLER]
    assert rows[1] == {"input_ids": [8, 9], "labels": [-100, 9]}


def test_padding_is_masked_by_position_and_not_by_id(prepared):
    # The pad id 0 also occurs inside a row, as a label that counts.
    rows = [{"input_ids": [4, 0, 0], "labels": [-100, 0, 0]}, {"input_ids": [4, 9], "labels": [-100, 9]}, FILLER]
    batch = pad_right(rows)
    assert batch["labels"].tolist() == [[-100, 0, 0], [-100, 9, -100], [-100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 0]]
    assert batch["input_ids"].tolist() == [[4, 0, 0], [4, 9, 0], [0, 0, 0]]
    assert batch["num_row_tokens"] == 5
    assert batch["num_trained_tokens"] == 3
    assert {batch[name].dtype for name in ("input_ids", "labels", "attention_mask")} == {torch.int64}


def test_a_label_at_the_first_position_is_no_target():
    assert pad_right([{"input_ids": [4, 5], "labels": [4, 5]}])["num_trained_tokens"] == 1


def test_upstream_still_repeats_rows_in_a_short_tail_and_has_one_seed():
    """What the sampler here is for; when this fails, upstream has mended it and less is needed."""
    upstream = BatchRebalanceSampler(lengths_of(9), effective_batch_size=8, dp_size=2, grad_accum=2, drop_last=False)
    rows = [row for batch in upstream for row in batch]
    other_rank = BatchRebalanceSampler(
        lengths_of(9), effective_batch_size=8, dp_size=2, grad_accum=2, drop_last=False, rank=1
    )
    rows += [row for batch in other_rank for row in batch]
    assert len(rows) == 12 and len(set(rows)) == 9
    assert upstream.seed == 42
