"""The validation split: exact in number, the same everywhere, and hardly moved by a row that is dropped."""

from collections import Counter

import pyarrow as pa
import pytest

from tunebook.data.drawing import Draw
from tunebook.data.labels import IGNORED, label_schema, label_turns
from tunebook.data.overflow import Overflow
from tunebook.data.split import EVALUATION_FILE, TRAIN_FILE, HeldOut, write_splits
from tunebook.data.tokens import EncodedTurn
from tunebook.plan.arithmetic import count_held_out


def write_labelled(path, ordinals, batch_rows=7):
    """Write a row for each ordinal: a prompt of two tokens and a response of the ordinal and a stop token."""
    with path.open("wb") as file, pa.ipc.new_stream(file, label_schema()) as stream:
        for start in range(0, len(ordinals), batch_rows):
            for ordinal in ordinals[start : start + batch_rows]:
                turn = EncodedTurn([1, 2], [1000 + ordinal, 3])
                stream.write_batch(label_turns([turn], [ordinal], Overflow(10)))
    return path


def split(tmp_path, ordinals, num_held_out, seed=0, num_first=3):
    labelled = write_labelled(tmp_path / "labelled.arrow", ordinals)
    splits = write_splits(labelled, tmp_path, HeldOut(len(ordinals), num_held_out, seed, num_first))
    return splits, *(ordinals_of(tmp_path / name) for name in (TRAIN_FILE, EVALUATION_FILE))


def ordinals_of(path):
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
        table = reader.read_all()
    assert table.column_names == ["input_ids", "labels", "length", "prompt_length"]
    for row in table.to_pylist():
        assert row["labels"] == [IGNORED, IGNORED, *row["input_ids"][2:]]
    return [ids[2] - 1000 for ids in table.column("input_ids").to_pylist()]


@pytest.mark.parametrize(
    ("num_rows", "fraction", "held_out"),
    [(100, 0.0, 0), (100, 0.02, 2), (2, 0.001, 1), (2, 0.999, 1), (10, 0.25, 2), (52_002, 0.01, 520), (3, 0.9, 2)],
)
def test_the_number_held_out_leaves_a_row_on_each_side(num_rows, fraction, held_out):
    assert count_held_out(num_rows, fraction) == held_out


def test_every_row_is_on_one_side_in_file_order(tmp_path):
    splits, train, evaluation = split(tmp_path, list(range(50)), 9)
    assert sorted(train + evaluation) == list(range(50))
    assert train == sorted(train)
    assert evaluation == sorted(evaluation)
    assert (splits.num_train_rows, splits.num_eval_rows) == (41, 9)
    assert splits.trained_tokens == 2 * 41


def test_the_first_held_out_rows_come_with_their_prompts(tmp_path):
    splits, _, evaluation = split(tmp_path, list(range(50)), 9)
    assert splits.first_held_out == [(ordinal, [1, 2], [1000 + ordinal, 3]) for ordinal in evaluation[:3]]


def drawn(ordinals, num_held_out, seed=0):
    draw = Draw(len(ordinals), num_held_out, seed)
    return [ordinal for ordinal in ordinals if draw.draw(ordinal)]


def test_the_split_follows_the_seed(tmp_path):
    rows = list(range(200))
    assert len({tuple(drawn(rows, 5, seed)) for seed in (0, 0, 1, 2)}) == 3
    # A finished run must find its split again under a later Python, too.
    assert drawn(rows, 5) == split(tmp_path, rows, 5)[2] == [35, 40, 117, 125, 169]


def test_a_dropped_row_hardly_moves_the_others():
    rows = list(range(1000))
    whole, without = set(drawn(rows, 100)), set(drawn([row for row in rows if row != 3], 100))
    assert len(whole) == len(without) == 100
    assert len(whole & without) >= 95


def test_each_row_is_as_likely_as_another():
    counts = Counter(row for seed in range(3000) for row in drawn(list(range(10)), 3, seed))
    assert sum(counts.values()) == 9000
    assert all(780 < counts[row] < 1020 for row in range(10))  # 900 expected, standard deviation 25


def test_nothing_held_out_leaves_an_empty_file(tmp_path):
    splits, train, evaluation = split(tmp_path, list(range(20)), 0)
    assert train == list(range(20))
    assert evaluation == []
    assert splits.first_held_out == []
