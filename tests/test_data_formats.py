"""Which records are rows of which form, what is wrong with the others, and which columns were meant."""

import json

import pytest

from tiny_data import CASES
from tunebook.data.columns import ambiguous_form, wrong_columns
from tunebook.data.conversation import Conversation, Fault, Message, pair
from tunebook.data.formats import find_forms, named_form, parse_row, wanted_columns
from tunebook.recipe.schema import FORM_COLUMNS, DataSource

GOOD = {"instruction": "Name a color.", "input": "", "output": "red"}
ALPACA = named_form("alpaca")


def source(**settings):
    return DataSource(path="rows.jsonl", **settings)


def forms_of(*records, **settings):
    return [form.title for form in find_forms(source(**settings), records)]


def test_absent_empty_blank_and_null_input_are_one_row():  # case D01
    lines = (CASES / "D01" / "data.jsonl").read_text().splitlines()
    rows = [parse_row(json.loads(line), ALPACA) for line in lines]
    assert rows[:4] == [pair("Name a color.", "red")] * 4
    assert rows[4].messages[0].text == "Name a color.\n\ncat"
    assert rows[0].messages[0].text == "Name a color."


def test_extra_columns_are_no_fault_and_texts_are_kept_as_they_are():
    assert parse_row(GOOD | {"output": "  red\r\n", "id": 3}, ALPACA) == pair("Name a color.", "  red\r\n")


def test_a_system_column_becomes_a_system_turn():
    row = parse_row(GOOD | {"system": "Be brief."}, ALPACA)
    assert [message.role for message in row.messages] == ["system", "user", "assistant"]
    assert (
        parse_row(GOOD | {"system": None}, ALPACA)
        == parse_row(GOOD | {"system": " "}, ALPACA)
        == pair("Name a color.", "red")
    )


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
        ({"system": 3}, "system", "system is the number 3, text expected"),
    ],
)
def test_a_bad_field_is_named_with_what_it_holds(change, field, reason):
    fault = parse_row(GOOD | change, ALPACA)
    assert isinstance(fault, Fault)
    assert fault.field == field
    assert fault.reason.startswith(reason)


def test_a_missing_field_is_not_called_null():
    assert parse_row({"instruction": "a"}, ALPACA) == Fault("output", "output is missing")
    assert parse_row({}, named_form("messages")) == Fault("messages", "messages is missing")
    assert parse_row({}, named_form("text")) == Fault("text", "text is missing")


@pytest.mark.parametrize("name", FORM_COLUMNS)
@pytest.mark.parametrize("value", [None, 3, "text", [GOOD], True])
def test_a_record_that_is_no_object_is_no_row(name, value):
    fault = parse_row(value, named_form(name))
    assert isinstance(fault, Fault)
    assert fault.reason.startswith(f"an object with {', '.join(named_form(name).required)} expected, got")


@pytest.mark.parametrize("text", ["😀", "é", "日本", "\ufeff", "\x00", "e\u0301"])
def test_ordinary_unicode_is_fine(text):
    assert parse_row(GOOD | {"output": text}, ALPACA).messages[1].content == text


TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
SAID = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


@pytest.mark.parametrize(
    ("record", "settings", "title"),
    [
        (GOOD, {}, "alpaca"),
        (GOOD | {"text": "### Instruction: ..."}, {}, "alpaca"),
        ({"instruction": "a", "output": "b", "messages": None}, {}, "alpaca"),
        ({"messages": TURNS}, {}, "messages"),
        ({"conversations": TURNS}, {}, "messages (conversations)"),
        ({"conversations": SAID, "id": 1}, {}, "sharegpt"),
        ({"messages": SAID}, {}, "sharegpt (messages)"),
        ({"conversations": json.dumps(SAID)}, {}, "sharegpt"),
        ({"prompt": "a", "completion": "b"}, {}, "prompt_completion"),
        ({"prompt": "a", "messages": TURNS}, {}, "messages"),
        ({"text": "a"}, {}, "text"),
        ({"question": "a", "answer": "b"}, {"columns": {"prompt": "question", "response": "answer"}},
         "prompt_completion (question, answer)"),
        ({"q": "a", "a": "b", "c": "c"}, {"columns": {"prompt": "q", "response": "a", "input": "c"}},
         "alpaca (q, c, a)"),
        ({"dialog": TURNS}, {"columns": {"messages": "dialog"}}, "messages (dialog)"),
        ({"dialog": SAID}, {"columns": {"messages": "dialog"}}, "sharegpt (dialog)"),
        ({"content": "a"}, {"columns": {"text": "content"}}, "text (content)"),
        ({"text": "a", "instruction": "a", "output": "b"}, {"format": "text"}, "text"),
        ({"Q": "a", "output": "b"}, {"format": "alpaca", "columns": {"prompt": "Q"}}, "alpaca (Q)"),
    ],
)  # fmt: skip
def test_the_form_is_told_by_the_columns(record, settings, title):
    assert forms_of(record, **settings) == [title]


def test_a_column_that_is_null_everywhere_tells_nothing_unless_nothing_else_does():
    assert forms_of({"instruction": "a", "output": "b", "prompt": None, "completion": None}) == ["alpaca"]
    assert forms_of({"instruction": "a", "output": None}) == ["alpaca"]


def test_columns_of_two_forms_are_refused_until_the_recipe_chooses():
    record = GOOD | {"prompt": "a", "completion": "b"}
    forms = find_forms(source(), [record])
    text = ambiguous_form(forms, "rows.jsonl", source()).render()
    assert "alpaca (instruction, output) and prompt_completion (prompt, completion)" in text
    assert "Set data.format to alpaca or prompt_completion" in text
    assert forms_of(record, format="alpaca") == ["alpaca"]


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        (["Instruction", "Input", "Output"], "prompt: Instruction, response: Output, input: Input"),
        (["instructions", "output"], "prompt: instructions, response: output"),
        (["prompt", "response"], "prompt: prompt, response: response"),
        (["question", "answer", "context"], "prompt: question, response: answer, input: context"),
        (["problem", "solution"], "prompt: problem, response: solution"),
        (["dialogue"], "messages: dialogue"),
        (["content"], "text: content"),
    ],
)
def test_wrong_columns_come_with_the_line_that_names_them(columns, named):  # case D09
    text = wrong_columns(columns, "rows.jsonl", source()).render()
    assert f"data.columns: {{{named}}}" in text
    assert f"columns {', '.join(columns)} found" in text
    assert "instruction, output (alpaca)" in text
    assert text.startswith("rows.jsonl: ")


def test_columns_without_any_likeness_are_listed():
    text = wrong_columns(["pixels"], "chat.jsonl", source(format="alpaca")).render()
    assert "columns pixels found; an alpaca row has instruction, output and, if wanted, input" in text
    assert "Write the rows with instruction and output" in text


def test_a_named_column_that_is_not_there_is_said():
    text = wrong_columns(["question", "reply"], "a.jsonl", source(columns={"prompt": "questions", "response": "reply"}))
    assert "data.columns names questions; nearest: question" in text.render()


def test_a_semicolon_between_columns_is_recognised():  # case D09
    text = wrong_columns(["instruction;input;output"], "semi.csv", source()).render()
    assert "one column was found, 'instruction;input;output'" in text
    assert "semicolon" in text


def test_only_the_columns_that_a_form_can_need_are_read():
    names = ["picture", "instruction", "input", "output", "text"]
    assert wanted_columns(names, source()) == ["instruction", "input", "output"]
    assert wanted_columns(["picture", "question"], source()) is None
    named = source(columns={"prompt": "q", "response": "a"})
    assert wanted_columns(["picture", "q", "a", "text"], named) == ["q", "a"]


def test_a_prompt_and_its_completion_may_be_messages():
    form = named_form("prompt_completion")
    asked = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    asked += [{"role": "user", "content": "c"}]
    row = parse_row({"prompt": asked, "completion": [{"role": "assistant", "content": "d"}]}, form)
    assert isinstance(row, Conversation)
    assert row.trained_turns("responses") == [4]
    assert parse_row({"prompt": asked, "completion": "d"}, form).trained_turns("responses") == [4]
    assert parse_row({"prompt": "a", "completion": "b"}, form) == pair("a", "b")
    fault = parse_row({"prompt": asked, "completion": [{"role": "user", "content": "d"}]}, form)
    assert "completion[4] is a turn of the user, after another one" in fault.reason


def test_a_plain_text_is_a_row_without_turns():
    assert parse_row({"text": "a b"}, named_form("text")) == Conversation((Message("text", "a b"),))
    assert parse_row({"text": " "}, named_form("text")) == Fault("text", "text is blank")
