"""Files of prompts: every form that training reads, answered or not, and what is said of those that are none."""

import json

import pytest

from tunebook.data.conversation import Message
from tunebook.errors import Refused
from tunebook.recipe.schema import DataSource
from tunebook.using.generate import shown_prompt
from tunebook.using.prompt_files import read_prompts

ALPACA = DataSource(path="rows.jsonl", format="alpaca")
HELLO = Message("user", "Hello")
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}


def write(path, *rows):
    lines = (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def asked(path, *sections):
    return [tuple(prompt.asked.messages) for prompt in read_prompts(path, sections)]


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "Hello"},
        {"instruction": "Hello", "output": "Hi"},
        {"instruction": "Hello", "input": "", "output": ""},
        {"prompt": "Hello"},
        {"prompt": "Hello", "completion": "Hi"},
        {"prompt": [{"role": "user", "content": "Hello"}]},
        {"prompt": [{"role": "user", "content": "Hello"}], "completion": [{"role": "assistant", "content": "Hi"}]},
        {"messages": [{"role": "user", "content": "Hello"}]},
        {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]},
        {"messages": json.dumps([{"role": "user", "content": "Hello"}])},
        {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi", "weight": 0}]},
        {"conversations": [{"from": "human", "value": "Hello"}]},
        {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]},
        {"conversations": [{"from": "human", "value": "Hello"}, {"from": "function_call", "value": '{"name": "f"}'}]},
    ],
    ids=lambda row: json.dumps(row)[:60],
)
def test_a_row_asks_for_its_last_answer_whether_it_has_one_or_not(tmp_path, row):
    path = write(tmp_path / "prompts.jsonl", row)
    # Whatever the recipe says of its own rows, a file in another form is read by its own columns.
    for sections in ([], [ALPACA]):
        [prompt] = read_prompts(path, sections)
        assert shown_prompt(prompt) == {"prompt": "Hello"}


def test_a_conversation_is_asked_with_all_turns_before_its_last_answer(tmp_path):
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Who are you?"},
    ]
    path = write(tmp_path / "prompts.jsonl", {"messages": turns, "tools": [TOOL]}, {"messages": turns[1:2]})
    [first, second] = read_prompts(path, [])
    assert shown_prompt(first) == {"messages": turns, "tools": [TOOL]}
    assert shown_prompt(second) == {"prompt": "Hello"}
    assert first.where == f"{path}:1"


def test_the_columns_that_the_recipe_names_are_read(tmp_path):
    named = DataSource(path="rows.jsonl", columns={"prompt": "question", "response": "answer"})
    path = write(tmp_path / "prompts.jsonl", {"question": "Hello"}, {"question": "Hello", "answer": "Hi"})
    assert asked(path, named) == [(HELLO,), (HELLO,)]
    with pytest.raises(Refused, match="question"):
        asked(path)


def test_an_alpaca_input_belongs_to_the_question(tmp_path):
    path = write(tmp_path / "prompts.json", json.dumps([{"instruction": "Translate.", "input": "cat", "output": "x"}]))
    [prompt] = read_prompts(path, [ALPACA])
    assert prompt.asked.messages == (Message("user", "Translate.", "cat"),)
    assert shown_prompt(prompt) == {"prompt": "Translate.\n\ncat"}
    assert prompt.where == f"{path} row 1"


def test_a_text_has_a_prompt_on_each_line(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffHello\r\n\r\n  \nWhat is 你好? 😀\n".encode())
    prompts = read_prompts(str(path), [ALPACA])
    assert [prompt.asked.messages[0].content for prompt in prompts] == ["Hello", "What is 你好? 😀"]
    assert [prompt.where for prompt in prompts] == [f"{path}:1", f"{path}:4"]


def test_a_table_needs_no_column_of_answers(tmp_path):
    path = tmp_path / "prompts.csv"
    path.write_text('instruction,input\nHello,\n"Say ""hi"", twice",\n')
    assert [messages[0].content for messages in asked(str(path), ALPACA)] == ["Hello", 'Say "hi", twice']


def test_bad_rows_are_named_together(tmp_path):
    rows = [{"prompt": "Hello"}, {"prompt": ""}, "{broken", {"prompt": 3}, {}, ["a list"], {"prompt": "Hello"}]
    path = write(tmp_path / "prompts.jsonl", *rows)
    with pytest.raises(Refused) as refused:
        read_prompts(path, [])
    lines = refused.value.render().splitlines()
    assert f"{path}: 5 of 7 prompts can't be used. Mend them; nothing was written" in lines[1]
    reasons = {2: "prompt is empty", 3: "not JSON", 4: "prompt is the number 3", 5: "prompt is missing", 6: "a list"}
    for line, (number, reason) in zip(lines[2:], reasons.items(), strict=True):
        assert line.strip().startswith(f"{path}:{number}: ") and reason in line


def test_only_the_first_bad_rows_are_listed(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"caf\xe9\n" * 20)
    with pytest.raises(Refused) as refused:
        read_prompts(str(path), [])
    assert len(refused.value.problems) == 6
    assert "20 of 20 prompts can't be used (the first 5 are listed)" in refused.value.render()
    assert "bytes that are not UTF-8" in refused.value.render()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("gone.jsonl", None, "no such file"),
        ("prompts.jsonl", "", "the file is empty"),
        ("prompts.jsonl", "\n\n", "no rows"),
        ("prompts.json", "[]", "no rows"),
        ("prompts.txt", "", "no prompts"),
        ("prompts.txt", " \n\r\n", "no prompts"),
        ("prompts.tsv", "Hello\n", "is not read"),
        ("prompts.jsonl", '{"text": "Once upon a time"}\n', "asks for no answer"),
        ("prompts.jsonl", '{"picture": 1}\n', "picture"),
        ("prompts.jsonl", '{"messages": []}\n', "messages is an empty list"),
        ("prompts.jsonl", '{"messages": [{"role": "system", "content": "x"}]}\n', "the first is the user's"),
    ],
)
def test_what_is_no_file_of_prompts_is_refused(tmp_path, name, content, reason):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(Refused) as refused:
        read_prompts(str(path), [ALPACA])
    assert reason in refused.value.render()
    assert str(path) in refused.value.render()
    assert "data." not in refused.value.render()
    assert "completion" not in refused.value.render(), "an answer of ours shows"
