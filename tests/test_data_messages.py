"""Lists of turns: what is kept of them, and every way in which one can be wrong."""

import json
import random

import pytest

from tunebook.data.conversation import Conversation, Fault, Message
from tunebook.data.formats import named_form, parse_row
from tunebook.recipe.schema import FORM_COLUMNS

USER, BOT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "é"}'}}
TOOL = {"role": "tool", "content": "42", "tool_call_id": "1", "name": "look"}


def read(messages, form="messages", **columns):
    column = named_form(form).columns["messages"]
    return parse_row({column: messages, **columns}, named_form(form))


def test_turns_are_kept_with_what_templates_show():
    calling = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    thinking = BOT | {"reasoning_content": "hm", "refusal": None}
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    row = read([{"role": "developer", "content": "s"}, USER, calling, TOOL, thinking], tools=json.dumps(tools))
    assert row.messages[0] == Message("system", "s")
    [call] = row.messages[2].more["tool_calls"]
    assert call == {"type": "function", "id": "1", "function": {"name": "look", "arguments": {"at": "é"}}}
    assert row.messages[3].for_template() == {"role": "tool", "content": "42", "tool_call_id": "1", "name": "look"}
    assert row.messages[4].more == {"reasoning_content": "hm"}
    assert row.tools == tuple(tools)
    assert row.trained_turns("responses") == [2, 4]
    assert row.trained_turns("last_response") == [4]


def test_contents_may_be_lists_of_text_parts():
    parts = [{"type": "text", "text": "a "}, "b", {"type": "text", "text": "c"}]
    assert read([USER | {"content": parts}, BOT]).messages[0].content == "a bc"


def test_a_weight_of_zero_leaves_a_turn_out():
    row = read([USER, BOT | {"weight": 0}, USER, BOT | {"weight": 1}])
    assert row.trained_turns("responses") == [3]


def test_sharegpt_turns_have_their_own_names():
    said = [("system", "s"), ("human", "a"), ("function_call", '{"name": "look", "arguments": {"at": 1}}')]
    said += [("observation", "42"), ("gpt", "b")]
    row = read([{"from": role, "value": value} for role, value in said], "sharegpt")
    assert [message.role for message in row.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert row.messages[2].more["tool_calls"][0]["function"]["name"] == "look"


def test_a_system_column_and_json_text_are_read():
    turns = json.dumps([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}])
    row = read(turns, "sharegpt", system="s", tools="")
    assert [message.role for message in row.messages] == ["system", "user", "assistant"]
    both = read([{"from": "system", "value": "s"}, *json.loads(turns)], "sharegpt", system="t")
    assert "begins with a system turn, and there is a system column" in both.reason


@pytest.mark.parametrize("form", ["messages", "sharegpt"])
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (3, "is the number 3, a list of turns expected"),
        ({"role": "user"}, "is an object, a list of turns expected"),
        ([], "is an empty list"),
        ("Hello", "which is no JSON"),
        (["a"], "[0] is the text 'a', an object with"),
        ([None], "[0] is null, an object with"),
        ([{}], "is missing"),
    ],
)
def test_what_is_no_list_of_turns_is_no_row(form, value, reason):
    fault = read(value, form)
    assert isinstance(fault, Fault)
    assert reason in fault.reason
    assert fault.field == named_form(form).columns["messages"]


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([USER | {"role": "User"}, BOT], "messages[0].role is the text 'User'; roles are system, developer, user"),
        ([USER | {"role": None}, BOT], "messages[0].role is null"),
        ([USER | {"role": 1}, BOT], "messages[0].role is the number 1"),
        ([{"content": "a"}, BOT], "messages[0].role is missing"),
        ([USER | {"content": None}, BOT], "messages[0].content is null"),
        ([{"role": "user"}, BOT], "messages[0].content is missing"),
        ([USER | {"content": ""}, BOT], "messages[0].content is empty"),
        ([USER, BOT | {"content": " \n"}], "messages[1].content is blank"),
        ([USER, BOT | {"content": None}], "messages[1].content is null"),
        ([USER, BOT | {"content": 4}], "messages[1].content is the number 4, text expected"),
        ([USER, BOT | {"content": "\ud800"}], "messages[1].content has a lone surrogate"),
        ([USER | {"content": []}, BOT], "messages[0].content is empty"),
        ([USER | {"content": [{"type": "image_url"}]}, BOT], "messages[0].content[0] is of type 'image_url'"),
        ([USER | {"content": [{"type": "text"}]}, BOT], "messages[0].content[0].text is null"),
        ([USER | {"content": ["\udcff"]}, BOT], "messages[0].content[0] has a lone surrogate"),
        ([BOT, USER, BOT], "messages[0] is a turn of the assistant, and the first is the user's"),
        ([USER, USER, BOT], "messages[1] is a turn of the user, after another one"),
        ([USER, BOT, BOT], "messages[2] is a turn of the assistant, after another one"),
        ([USER, TOOL, BOT], "messages[1] is a turn of the tool, and no call"),
        ([USER, BOT, TOOL, USER, BOT], "messages[3] is a turn of the user, and the assistant has not answered"),
        ([USER], "messages has no turn of the assistant"),
        ([{"role": "system", "content": "s"}], "messages has no turn of the assistant"),
        ([USER, BOT | {"weight": 0}], "weight 0 for every turn"),
        ([USER, BOT | {"weight": 0.5}], "messages[1].weight is the number 0.5"),
        ([USER | {"tool_calls": [CALL]}, BOT], "only the assistant calls tools"),
        ([USER, BOT | {"tool_calls": 3}], "messages[1].tool_calls is the number 3, a list of calls"),
        ([USER, BOT | {"tool_calls": ["x"]}], "messages[1].tool_calls[0] is the text 'x'"),
        ([USER, BOT | {"tool_calls": [{"function": {"arguments": "{}"}}]}], "tool_calls[0].name is missing"),
        (
            [USER, BOT | {"tool_calls": [{"name": "f", "arguments": "{"}]}],
            "arguments is the text '{', which is no JSON",
        ),
        ([USER, BOT | {"tool_calls": [{"name": "f", "arguments": "3"}]}], "arguments is the number 3, an object"),
        ([USER, BOT | {"tool_calls": [{"name": "f", "arguments": {"a": "\ud800"}}]}], "arguments has a lone surrogate"),
        ([USER, BOT | {"tool_calls": [CALL]}, USER, BOT], "messages[2] is a turn of the user, and the tool's result"),
        ([USER | {"name": 3}, BOT], "messages[0].name is the number 3"),
    ],
)
def test_a_wrong_turn_is_named(turns, reason):
    fault = read(turns)
    assert isinstance(fault, Fault), fault
    assert reason in fault.reason
    assert fault.field == "messages"


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ("[", "tools is the text '[', which is no JSON"),
        (3, "tools is the number 3, a list of objects expected"),
        ([3], "tools[0] is the number 3, an object expected"),
        ([{"type": "function"}], "tools[0] name is null"),
    ],
)
def test_wrong_tools_are_named(tools, reason):
    assert reason in read([USER, BOT], tools=tools).reason


def test_no_tools_have_many_spellings():
    for tools in (None, "", " ", "[]", []):
        assert read([USER, BOT], tools=tools).tools == ()


def test_a_row_may_end_with_the_user_or_with_a_call():
    assert read([USER, BOT, USER]).trained_turns("responses") == [1]
    assert read([USER, BOT | {"content": "", "tool_calls": [CALL]}]).trained_turns("responses") == [1]


def nested(levels):
    return {"a": nested(levels - 1)} if levels else 1


def test_arguments_that_are_nested_too_deeply_are_no_crash():
    deep = BOT | {"tool_calls": [{"name": "f", "arguments": nested(600)}]}
    assert "is nested deeper than 50 levels" in read([USER, deep]).reason
    assert (
        "is nested deeper than 50 levels" in read([USER, BOT], tools=[{"name": "f", "parameters": nested(600)}]).reason
    )


def anything(draw, depth=0):
    """Return a random JSON value, made of the words that rows are made of."""
    words = ["role", "content", "from", "value", "user", "assistant", "human", "gpt", "tool", "a", "", " ", "\ud800"]
    words += ["tool_calls", "function", "name", "arguments", "weight", "type", "text", "[]", "{}", "null"]
    kind = draw.randrange(8 if depth < 5 else 6)
    if kind < 6:
        return [None, True, draw.randrange(-1, 3), draw.choice(words), draw.choice(words), float("nan")][kind]
    if kind == 6:
        return [anything(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {draw.choice(words): anything(draw, depth + 1) for _ in range(draw.randrange(6))}


def test_whatever_a_record_holds_is_a_row_or_a_fault():
    draw = random.Random(0)
    columns = ["messages", "conversations", "tools", "system", "prompt", "completion", "text", "instruction", "output"]
    results = {Conversation: 0, Fault: 0}
    for _ in range(5000):
        record = {column: anything(draw) for column in columns}
        if draw.random() < 0.8:
            turns = [
                {"role": draw.choice(["user", "assistant", "tool"])} | {"content": anything(draw, 4)} for _ in "ab"
            ]
            record["messages"] = turns + draw.choice([[], [anything(draw)]])
        for name in FORM_COLUMNS:
            row = parse_row(record, named_form(name))
            results[type(row)] += 1
            if isinstance(row, Conversation):
                json.dumps(row, ensure_ascii=False).encode()
    assert min(results.values()) > 300
