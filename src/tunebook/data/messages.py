"""Lists of turns as data sets write them, OpenAI's messages and ShareGPT's conversations, read strictly."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tunebook.data.conversation import Conversation, Message, kind_of, surrogate_place, text_fault

# What each role is called in a chat template.
_MESSAGE_ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
    "tool": "tool", "function": "tool",
}  # fmt: skip
_SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "model": "assistant", "function_call": "call", "tool_call": "call",
    "observation": "tool", "tool": "tool", "function_response": "tool", "tool_response": "tool",
}  # fmt: skip
# Texts beside the content that chat templates show.
_MORE_TEXTS = ("name", "tool_call_id", "reasoning_content", "thinking")
# Templates and what prepares their variables go down by recursion.
_DEEPEST = 50


class Wrong(ValueError):
    """A row or a part of it is not what its form says; the text says what is wrong."""


class _Names(NamedTuple):
    """How a kind of list names role and content, and its roles."""

    role: str
    content: str
    roles: Mapping[str, str]


_NAMES = {
    "messages": _Names("role", "content", _MESSAGE_ROLES),
    "sharegpt": _Names("from", "value", _SHAREGPT_ROLES),
}


def read_conversation(value: Any, form: str, column: str, tools: Any = None, system: str = "") -> Conversation:
    """Return the conversation of a row of the form messages or sharegpt. Raises `Wrong` with the first thing wrong.

    `value` is the list of turns, or its JSON text; so is `tools`. `system` is a system text from a column of its own.
    """
    messages = read_messages(value, form, column)
    if system:
        if messages[0].role == "system":
            raise Wrong(f"{column} begins with a system turn, and there is a system column beside it")
        messages = (Message("system", system), *messages)
    check_order(messages, column)
    return Conversation(messages, read_tools(tools))


def read_messages(value: Any, form: str, column: str) -> tuple[Message, ...]:
    """Return the turns of a list, or of its JSON text, without looking at their order. Raises `Wrong`."""
    turns = _decoded(value, column)
    if not isinstance(turns, list | tuple):
        raise Wrong(f"{column} is {kind_of(turns)}, a list of turns expected")
    if not turns:
        raise Wrong(f"{column} is an empty list")
    return tuple(_read_turn(turn, _NAMES[form], f"{column}[{number}]") for number, turn in enumerate(turns))


def find_kind(value: Any) -> str | None:
    """Return whether a value is a list of messages or of sharegpt turns, by the keys of its first; None if neither."""
    try:
        turns = _decoded(value, "")
    except Wrong:
        return None
    first = turns[0] if isinstance(turns, list | tuple) and turns else None
    if not isinstance(first, Mapping):
        return None
    return next((form for form, names in _NAMES.items() if names.role in first), None)


def ended_by_answer(value: Any, answer: str) -> Any:
    """Return a list of turns, or of its JSON text, that ends with the assistant's `answer`.

    It takes the place of an answer at the end; what is no list of turns comes back as it is.
    """
    kind = find_kind(value)
    if kind is None:
        return value
    names, turns = _NAMES[kind], list(_decoded(value, ""))
    role = turns[-1].get(names.role) if isinstance(turns[-1], Mapping) else None
    is_answered = isinstance(role, str) and names.roles.get(role) in ("assistant", "call")
    own = next(name for name, meant in names.roles.items() if meant == "assistant")
    return [*(turns[:-1] if is_answered else turns), {names.role: own, names.content: answer}]


def _read_turn(turn: Any, names: _Names, place: str) -> Message:
    if not isinstance(turn, Mapping):
        raise Wrong(f"{place} is {kind_of(turn)}, an object with {names.role} and {names.content} expected")
    role = turn.get(names.role)
    if not isinstance(role, str):
        raise Wrong(text_fault(f"{place}.{names.role}", role, is_given=names.role in turn))
    if role not in names.roles:
        known = ", ".join(dict.fromkeys(names.roles))
        raise Wrong(f"{place}.{names.role} is {kind_of(role)}; roles are {known}")
    content, given = turn.get(names.content), names.content in turn
    where = f"{place}.{names.content}"
    meant = names.roles[role]
    if meant == "call":
        return Message("assistant", "", more={"tool_calls": _read_calls(_decoded(content, where), where)})
    more = _read_more(turn, place) if names.role == "role" else {}
    text = _read_content(content, where, given, may_be_null=meant == "assistant" and "tool_calls" in more)
    # A tool may return nothing, and an empty system turn takes the template's own away.
    speaks = meant == "user" or (meant == "assistant" and "tool_calls" not in more)
    if speaks and (fault := text_fault(where, text)):
        raise Wrong(fault)
    return Message(meant, text, more=more or None, is_trained=_read_weight(turn, meant, place))


def _read_content(content: Any, where: str, given: bool, may_be_null: bool) -> str:
    if content is None and may_be_null:
        return ""
    if isinstance(content, list | tuple):
        return "".join(_read_part(part, f"{where}[{number}]") for number, part in enumerate(content))
    if fault := text_fault(where, content, required=False, is_given=given):
        raise Wrong(fault)
    return str(content)


def _read_part(part: Any, where: str) -> str:
    text = part
    if isinstance(part, Mapping):
        kind = part.get("type", "text")
        if kind not in ("text", "input_text", "output_text"):
            raise Wrong(f"{where} is of type {str(kind)[:40]!r}; only text is trained")
        text, where = part.get("text"), f"{where}.text"
    if fault := text_fault(where, text, required=False):
        raise Wrong(fault)
    return str(text)


def _read_weight(turn: Mapping[str, Any], role: str, place: str) -> bool:
    """Return whether an assistant's turn is trained: OpenAI's `weight` of 0 excludes it."""
    weight = turn.get("weight")
    if weight is None or role != "assistant":
        return True
    if isinstance(weight, bool) or weight not in (0, 1):
        raise Wrong(f"{place}.weight is {kind_of(weight)}; 0 (not trained) or 1 expected")
    return bool(weight == 1)


def _read_more(turn: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return what else of a turn templates show."""
    more: dict[str, Any] = {}
    for name in _MORE_TEXTS:
        if turn.get(name) is not None:
            if fault := text_fault(f"{place}.{name}", turn[name], required=False):
                raise Wrong(fault)
            more[name] = turn[name]
    calls = turn.get("tool_calls")
    if calls is None and turn.get("function_call") is not None:  # OpenAI's form before there were tools
        calls = [turn["function_call"]]
    if calls is not None and not (isinstance(calls, list | tuple) and not calls):
        if turn.get("role") != "assistant":
            raise Wrong(f"{place} has tool_calls; only the assistant calls tools")
        more["tool_calls"] = _read_calls(calls, f"{place}.tool_calls")
    return more


def _read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects: templates write them out as JSON themselves."""
    listed = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(listed, list | tuple) or not listed:
        raise Wrong(f"{where} is {kind_of(calls)}, a list of calls expected")
    return [_read_call(call, f"{where}[{number}]") for number, call in enumerate(listed)]


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(function, Mapping):
        raise Wrong(f"{where} is {kind_of(function)}, an object with name and arguments expected")
    if fault := text_fault(f"{where}.name", function.get("name"), is_given="name" in function):
        raise Wrong(fault)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _decoded(arguments or "{}", f"{where}.arguments")
    if not isinstance(arguments, Mapping):
        raise Wrong(f"{where}.arguments is {kind_of(arguments)}, an object or its JSON text expected")
    _check_encodable(arguments, f"{where}.arguments")
    read: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
    if isinstance(call.get("id"), str):
        read["id"] = call["id"]
    return read


def read_tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Return the tools that a row offers, from a list of objects or its JSON text. Raises `Wrong`."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return ()
    tools = _decoded(value, "tools")
    if not isinstance(tools, list | tuple):
        raise Wrong(f"tools is {kind_of(tools)}, a list of objects expected")
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise Wrong(f"tools[{number}] is {kind_of(tool)}, an object expected")
        if fault := text_fault(f"tools[{number}] name", tool_name(tool)):
            raise Wrong(fault)
    _check_encodable(tools, "tools")
    return tuple(tools)


def tool_name(tool: Mapping[str, Any]) -> Any:
    """Return the name of a tool, in OpenAI's wrapping or without it."""
    function = tool.get("function", tool)
    return function.get("name") if isinstance(function, Mapping) else None


def check_order(messages: Sequence[Message], column: str) -> None:
    """Raise `Wrong` where the turns can't have followed each other, or none is the assistant's.

    A system turn may stand anywhere: which places it can take is the template's word.
    """
    before: Message | None = None
    for number, message in enumerate(messages):
        role = message.role
        if role == "system":
            continue
        here = f"{column}[{number}] is a turn of the {role}"
        if before is None and role != "user":
            raise Wrong(f"{here}, and the first is the user's")
        if before is not None and role == before.role != "tool":
            raise Wrong(f"{here}, after another one")
        if before is not None and role == "tool" and before.role == "user":
            raise Wrong(f"{here}, and no call of the assistant stands before it")
        if before is not None and role == "user" and before.role == "tool":
            raise Wrong(f"{here}, and the assistant has not answered the tool's result")
        if before is not None and role == "user" and (before.more or {}).get("tool_calls"):
            raise Wrong(f"{here}, and the tool's result is missing before it")
        before = message
    if not any(message.role == "assistant" for message in messages):
        raise Wrong(f"{column} has no turn of the assistant")
    if not any(message.role == "assistant" and message.is_trained for message in messages):
        raise Wrong(f"{column} has weight 0 for every turn of the assistant")


def _decoded(value: Any, where: str) -> Any:
    """Return a JSON text's value: csv and parquet files hold lists so. Other values come back as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise Wrong(f"{where} is {kind_of(value)}, which is no JSON") from error


def _check_encodable(value: Any, where: str) -> None:
    if _is_deeper(value, _DEEPEST):
        raise Wrong(f"{where} is nested deeper than {_DEEPEST} levels")
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Wrong(f"{where} can't be written as JSON: {str(error)[:60]}") from error
    if surrogate_place(text):
        raise Wrong(f"{where} has a lone surrogate or bytes that are not UTF-8")


def _is_deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return levels == 0 or any(_is_deeper(one, levels - 1) for one in inner)
