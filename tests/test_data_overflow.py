"""What a limit does to rows, and what the table says that others would do."""

import random

import numpy as np
import pytest

from tunebook.data.overflow import Overflow, Truncation


def rows_with_labels():
    """Return the lengths of 200 rows and the positions of their labels, several stretches of them in some rows."""
    draw = random.Random(3)
    lengths = [draw.choice([1, 2, 8, 16, 17, 40, 100]) for _ in range(200)]
    return [(length, sorted({draw.randrange(1, length) for _ in range(length // 2)})) for length in lengths if length]


def fed(rows, max_length, policy, batch_rows=30):
    overflow, kept = Overflow(max_length, policy), []
    for start in range(0, len(rows), batch_rows):
        batch = rows[start : start + batch_rows]
        lengths = np.array([length for length, _ in batch])
        positions = np.array([position for _, labels in batch for position in labels], np.int64)
        row_of = np.array([row for row, (_, labels) in enumerate(batch) for _ in labels], np.int64)
        kept += overflow.kept_lengths(lengths, positions, row_of, range(start, start + len(batch))).tolist()
    return overflow, kept


def effect(rows, max_length, policy):
    """Say row by row what a limit does, in the plainest way."""
    cut = dropped = lost = 0
    kept = []
    for length, labels in rows:
        left = [position for position in labels if position < max_length]
        is_longer = length > max_length
        if not left or (is_longer and policy == "drop"):
            dropped, lost = dropped + 1, lost + len(labels)
            kept.append(0)
        else:
            cut, lost = cut + is_longer, lost + len(labels) - len(left)
            kept.append(left[-1] + 1 if is_longer else length)
    return Truncation(max_length, cut, dropped, lost), kept


@pytest.mark.parametrize("policy", ["truncate", "drop"])
@pytest.mark.parametrize("max_length", [2, 5, 16, 17, 100, 4096])
def test_each_limit_of_the_table_is_what_that_limit_does(policy, max_length):
    rows = rows_with_labels()
    overflow, kept = fed(rows, max_length, policy)
    assert (overflow.at_limit(), kept) == effect(rows, max_length, policy)
    table = overflow.table()
    assert overflow.at_limit() in table
    for row in table:
        assert row == effect(rows, row.max_length, policy)[0]
    limits = [row.max_length for row in table]
    assert limits == sorted(limits) and limits[-1] >= 100 and len(limits) <= 11


def test_one_batch_or_many_give_the_same_counts():
    rows = rows_with_labels()
    assert fed(rows, 16, "truncate")[0].table() == fed(rows, 16, "truncate", batch_rows=len(rows))[0].table()


def test_the_first_longer_rows_are_remembered_and_all_are_counted():
    rows = [(length, [1]) for length in (5, 9, 8, 9, 12, 9, 9, 9)]
    overflow, _ = fed(rows, 8, "error", batch_rows=3)
    assert overflow.num_longer_rows == 6
    assert overflow.first_longer_rows == [(1, 9), (3, 9), (4, 12), (5, 9), (6, 9)]
    assert overflow.longest_row == 12


def test_copies_and_parts_are_one_longer_row_and_the_longest_of_them_is_told():
    overflow = Overflow(8, "error")
    lengths, row_of = np.array([9, 5, 12, 3, 9, 9]), np.arange(6)
    overflow.kept_lengths(lengths, np.ones(6, np.int64), row_of, [0, 2, 2, 3, 4, 4])
    assert (overflow.num_longer_rows, overflow.first_longer_rows) == (3, [(0, 9), (2, 12), (4, 9)])
    assert overflow.at_limit().num_truncated_rows == 4


@pytest.mark.parametrize("policy", ["truncate", "drop", "error"])
def test_no_rows_at_all_count_nothing(policy):
    overflow, kept = fed([], 8, policy)
    none = np.zeros(0, np.int64)
    assert overflow.kept_lengths(none, none, none, none).tolist() == kept == []
    assert overflow.at_limit() == Truncation(8, 0, 0, 0)


def test_a_million_tokens_is_where_the_table_ends():
    overflow, kept = fed([(3_000_000, [2_999_999])], 1_000_000, "truncate")
    assert kept == [0]
    assert overflow.table()[-1] == Truncation(1 << 20, 0, 1, 1)
