"""Which labels count, and what the length limit does to a row."""

import pytest

from tunebook.data.labels import IGNORED, label_turns
from tunebook.data.overflow import Overflow, Truncation
from tunebook.data.tokens import EncodedTurn

STOP = 9


def label(*turns, max_length=10, policy="truncate"):
    overflow = Overflow(max_length, policy)
    encoded = [EncodedTurn(prompt, response) for prompt, response in turns]
    return label_turns(encoded, range(len(encoded)), overflow).to_pylist(), overflow


def test_the_response_and_its_stop_token_are_trained_and_nothing_else():
    rows, overflow = label(([1, 2, 3], [4, 5, STOP]), ([1], [STOP]))
    assert rows == [
        {
            "input_ids": [1, 2, 3, 4, 5, STOP],
            "labels": [IGNORED, IGNORED, IGNORED, 4, 5, STOP],
            "length": 6,
            "ordinal": 0,
            "prompt_length": 3,
        },
        {"input_ids": [1, STOP], "labels": [IGNORED, STOP], "length": 2, "ordinal": 1, "prompt_length": 1},
    ]
    assert overflow.at_limit() == Truncation(10, 0, 0, 0)
    assert overflow.longest_row == 6


def test_a_row_of_exactly_the_limit_is_whole():
    rows, overflow = label(([1, 2], [3, 4, STOP]), max_length=5)
    assert rows[0]["labels"][-1] == STOP
    assert overflow.at_limit().num_truncated_rows == 0


def test_a_longer_row_is_cut_and_gets_no_stop_token():
    rows, overflow = label(([1, 2], [3, 4, 5, STOP]), max_length=4)
    assert rows[0]["input_ids"] == [1, 2, 3, 4]
    assert rows[0]["labels"] == [IGNORED, IGNORED, 3, 4]
    assert overflow.at_limit() == Truncation(4, num_truncated_rows=1, num_dropped_rows=0, response_tokens_lost=2)
    assert overflow.longest_row == 6


def test_a_row_without_a_response_token_is_dropped_and_keeps_the_others_ordinals():
    rows, overflow = label(([1] * 4, [3, STOP]), ([1] * 9, [3, STOP]), ([1], [3, STOP]), max_length=4)
    assert [row["ordinal"] for row in rows] == [2]
    assert overflow.at_limit() == Truncation(4, num_truncated_rows=0, num_dropped_rows=2, response_tokens_lost=4)
    assert overflow.longest_row == 11


def test_the_first_position_is_never_a_label():
    rows, overflow = label(([], [3, 4, STOP]), ([], [STOP]))
    assert rows[0]["labels"] == [IGNORED, 4, STOP]
    assert rows[0]["prompt_length"] == 0
    assert overflow.at_limit().num_dropped_rows == 1


def test_nothing_left_is_an_empty_batch():
    rows, overflow = label(([1, 2, 3], [4]), max_length=2)
    assert rows == []
    assert overflow.at_limit().num_dropped_rows == 1


# Two prompts of two tokens, two of three and four: the responses stand at 2..4, 7..8 and 11..14.
TALK = EncodedTurn([1, 1], [4, 5, STOP, 2, 2, 6, STOP, 3, 3, 7, 8, 8, STOP], ((3, 5), (7, 9)), 11)
TRAINED = [2, 3, 4, 7, 8, 11, 12, 13, 14]


@pytest.mark.parametrize("limit", range(2, 17))
def test_a_conversation_is_cut_after_its_last_response_that_is_left(limit):
    overflow = Overflow(limit)
    rows = label_turns([TALK], [5], overflow).to_pylist()
    ids = TALK.prompt_ids + TALK.response_ids
    left = [place for place in TRAINED if place < limit]
    lost = len(TRAINED) - len(left)
    assert overflow.at_limit() == Truncation(limit, int(lost > 0 and bool(left)), int(not left), lost)
    if not left:
        assert rows == []
        return
    [row] = rows
    assert row["input_ids"] == ids[: left[-1] + 1]
    assert row["labels"] == [ids[place] if place in left else IGNORED for place in range(left[-1] + 1)]
    assert row["length"] == left[-1] + 1
    assert (row["ordinal"], row["prompt_length"]) == (5, 11 if left[-1] >= 11 else 0)
    for other in overflow.table():
        limited = Overflow(other.max_length)
        label_turns([TALK], [5], limited)
        assert limited.at_limit() == other


@pytest.mark.parametrize(("policy", "lengths"), [("truncate", [3, 9, 3, 9]), ("drop", [3, 3]), ("error", [3, 9, 3, 9])])
def test_gaps_belong_to_their_own_row_among_others(policy, lengths):
    single = EncodedTurn([1], [6, STOP])
    overflow = Overflow(11, policy)
    rows = label_turns([single, TALK, single, TALK], [0, 3, 4, 4], overflow).to_pylist()
    assert [row["length"] for row in rows] == lengths
    ids = TALK.prompt_ids + TALK.response_ids
    for row in rows:
        if row["length"] == 3:
            assert row["labels"] == [IGNORED, 6, STOP]
        else:
            assert row["labels"] == [ids[place] if place in TRAINED else IGNORED for place in range(9)]
    assert (overflow.num_longer_rows, overflow.first_longer_rows) == (2, [(3, 15), (4, 15)])
    assert overflow.at_limit().response_tokens_lost == (2 * 9 if policy == "drop" else 2 * 4)


def test_no_turns_are_an_empty_batch():
    assert label_turns([], [], Overflow(4)).to_pylist() == []
