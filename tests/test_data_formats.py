"""Which records are Alpaca rows, what is wrong with the others, and which columns were meant."""

import json

import pytest

from tiny_data import CASES
from tunebook.data.formats import AlpacaRow, Fault, find_wrong_columns, parse_alpaca

GOOD = {"instruction": "Name a color.", "input": "", "output": "red"}


def test_absent_empty_blank_and_null_input_are_one_row():  # case D01
    lines = (CASES / "D01" / "data.jsonl").read_text().splitlines()
    rows = [parse_alpaca(json.loads(line)) for line in lines]
    assert rows[:4] == [AlpacaRow("Name a color.", "", "red")] * 4
    assert rows[4].question == "Name a color.\n\ncat"
    assert rows[0].question == "Name a color."


def test_extra_columns_are_no_fault_and_texts_are_kept_as_they_are():
    assert parse_alpaca(GOOD | {"output": "  red\r\n", "id": 3}) == AlpacaRow("Name a color.", "", "  red\r\n")


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"output": None}, "output", "output is null"),
        ({"output": ""}, "output", "output is empty"),
        ({"output": " \n"}, "output", "output is blank"),
        ({"instruction": 42}, "instruction", "instruction is the number 42, text expected"),
        ({"instruction": True}, "instruction", "instruction is true, text expected"),
        ({"instruction": ["a"]}, "instruction", "instruction is a list, text expected"),
        ({"input": {"a": 1}}, "input", "input is an object, text expected"),
        ({"input": 0}, "input", "input is the number 0, text expected"),
        ({"output": "a\ud83d"}, "output", "output has a lone surrogate or bytes that are not UTF-8 (character 2)"),
        ({"instruction": None, "output": 1.5}, "instruction, output", "instruction is null; output is the number 1.5"),
    ],
)
def test_a_bad_field_is_named_with_what_it_holds(change, field, reason):
    fault = parse_alpaca(GOOD | change)
    assert isinstance(fault, Fault)
    assert fault.field == field
    assert fault.reason.startswith(reason)


def test_a_missing_field_is_not_called_null():
    assert parse_alpaca({"instruction": "a"}) == Fault("output", "output is missing")


@pytest.mark.parametrize("value", [None, 3, "text", [GOOD], True])
def test_a_record_that_is_no_object_is_no_row(value):
    fault = parse_alpaca(value)
    assert isinstance(fault, Fault)
    assert "an object with instruction, output expected, got" in fault.reason


@pytest.mark.parametrize("text", ["😀", "é", "日本", "\ufeff", "\x00", "e\u0301"])
def test_ordinary_unicode_is_fine(text):
    assert parse_alpaca(GOOD | {"output": text}).output == text


@pytest.mark.parametrize(
    ("columns", "renamings"),
    [
        (["Instruction", "Input", "Output"], "Instruction to instruction, Output to output, Input to input"),
        (["instructions", "output"], "instructions to instruction"),
        (["prompt", "response"], "prompt to instruction, response to output"),
        (["question", "answer", "context"], "question to instruction, answer to output, context to input"),
        (["instruction", "input", "completion"], "completion to output"),
    ],
)
def test_wrong_columns_come_with_the_ones_that_were_meant(columns, renamings):  # case D09
    text = find_wrong_columns(columns, "rows.jsonl").render()
    assert f"Rename {renamings}" in text
    assert f"columns {', '.join(columns)} found" in text
    assert "instruction, output and, if wanted, input" in text
    assert text.startswith("rows.jsonl: ")


def test_columns_without_any_likeness_are_listed():
    assert "Write the rows with instruction and output" in find_wrong_columns(["conversations"], "chat.jsonl").render()


def test_right_columns_are_no_problem():
    assert find_wrong_columns(["output", "x", "instruction"], "rows.jsonl") is None
