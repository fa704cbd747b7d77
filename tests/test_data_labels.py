"""Which labels count, and what the length limit does to a row."""

from tunebook.data.labels import IGNORED, Tally, label_turns
from tunebook.data.tokens import EncodedTurn

STOP = 9


def label(*turns, max_length=10):
    tally = Tally()
    encoded = [EncodedTurn(prompt, response) for prompt, response in turns]
    return label_turns(encoded, range(len(encoded)), max_length, tally).to_pylist(), tally


def test_the_response_and_its_stop_token_are_trained_and_nothing_else():
    rows, tally = label(([1, 2, 3], [4, 5, STOP]), ([1], [STOP]))
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
    assert tally == Tally(longest_row=6)


def test_a_row_of_exactly_the_limit_is_whole():
    rows, tally = label(([1, 2], [3, 4, STOP]), max_length=5)
    assert rows[0]["labels"][-1] == STOP
    assert tally.num_truncated_rows == 0


def test_a_longer_row_is_cut_and_gets_no_stop_token():
    rows, tally = label(([1, 2], [3, 4, 5, STOP]), max_length=4)
    assert rows[0]["input_ids"] == [1, 2, 3, 4]
    assert rows[0]["labels"] == [IGNORED, IGNORED, 3, 4]
    assert tally == Tally(num_truncated_rows=1, response_tokens_lost=2, longest_row=6)


def test_a_row_without_a_response_token_is_dropped_and_keeps_the_others_ordinals():
    rows, tally = label(([1] * 4, [3, STOP]), ([1] * 9, [3, STOP]), ([1], [3, STOP]), max_length=4)
    assert [row["ordinal"] for row in rows] == [2]
    assert tally == Tally(num_dropped_rows=2, response_tokens_lost=4, longest_row=11)


def test_the_first_position_is_never_a_label():
    rows, tally = label(([], [3, 4, STOP]), ([], [STOP]))
    assert rows[0]["labels"] == [IGNORED, 4, STOP]
    assert rows[0]["prompt_length"] == 0
    assert tally.num_dropped_rows == 1


def test_nothing_left_is_an_empty_batch():
    rows, tally = label(([1, 2, 3], [4]), max_length=2)
    assert rows == []
    assert tally.num_dropped_rows == 1
