"""The form of a row: which columns it has, what they stand for, and how a record of it becomes a conversation."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunebook.data.conversation import Conversation, Fault, Message, kind_of, pair, text_fault
from tunebook.data.messages import Wrong, check_order, find_kind, read_conversation, read_messages, read_tools
from tunebook.recipe.schema import FORM_COLUMNS, FORM_REQUIRED, DataSource

# Where a list of turns is looked for when no column is named.
_TURN_COLUMNS = ("messages", "conversations", "conversation")


@dataclass(frozen=True)
class Form:
    """A form of row as one file has it: `columns` says which column holds which part (prompt, response, ...)."""

    name: str
    columns: Mapping[str, str]

    @property
    def required(self) -> list[str]:
        """The columns that every row must have."""
        return [self.columns[part] for part in FORM_REQUIRED[self.name]]

    @property
    def optional(self) -> list[str]:
        """The columns that a row may have besides."""
        return [column for part, column in self.columns.items() if part not in FORM_REQUIRED[self.name]]

    @property
    def title(self) -> str:
        """The form as the plan names it, with the columns where they are not its own."""
        own = FORM_COLUMNS[self.name]
        named = [column for part, column in self.columns.items() if own.get(part) != column]
        return f"{self.name} ({', '.join(named)})" if named else self.name


def named_form(name: str, columns: Mapping[str, str] | None = None) -> Form:
    """Return a form by its name, with the columns that a recipe names in place of its own."""
    own = FORM_COLUMNS[name]
    return Form(name, {**own, **{part: column for part, column in (columns or {}).items() if part in own}})


def possible_forms(section: DataSource) -> list[Form]:
    """Return the forms that rows of a source may have by what the recipe says of it."""
    given = section.columns or {}
    if section.format != "auto":
        return [named_form(section.format, given)]
    forms = []
    for name, own in FORM_COLUMNS.items():
        if not given.keys() <= own.keys() or (
            name == "alpaca" and {"prompt", "response"} <= given.keys() and "input" not in given
        ):
            continue  # question and answer by name are a prompt and its completion
        lists = [{}] if "messages" in given or "messages" not in own else [{"messages": c} for c in _TURN_COLUMNS]
        forms += [named_form(name, {**given, **named}) for named in lists]
    return forms


def wanted_columns(names: Sequence[str], section: DataSource) -> list[str] | None:
    """Return which of the columns `names` to read; None for all, where no form fits and they are to be shown."""
    fitting = [form for form in possible_forms(section) if set(form.required) <= set(names)]
    others = [form for form in fitting if form.name != "text"]  # rendered text beside the fields it was made of
    wanted = {column for form in others or fitting for column in (*form.required, *form.optional)}
    return [name for name in names if name in wanted] if wanted else None


def find_forms(section: DataSource, records: Iterable[Mapping[str, Any]]) -> list[Form]:
    """Return the forms that fit the first records of a file: one, or several where it can't be told, or none.

    A column counts as there if some record has more than null in it; failing that, if some record has its name.
    """
    seen = list(records)
    filled = {str(column) for record in seen for column, value in record.items() if value is not None}
    named = {str(column) for record in seen for column in record}
    for columns in (filled, named):
        fitting = [form for form in possible_forms(section) if set(form.required) <= columns]
        if section.format == "auto":
            fitting = [form for form in fitting if _is_kind(form, seen)]
        others = [form for form in fitting if form.name != "text"]
        if fitting:
            return others or fitting
    return []


def _is_kind(form: Form, records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a list of turns is of this form's kind, told by its first turn; true for forms without turns."""
    if "messages" not in FORM_REQUIRED[form.name]:
        return True
    column = form.columns["messages"]
    kinds = (find_kind(record.get(column)) for record in records)
    # Where no record has a turn to tell by, the column's usual form is taken.
    usual = "messages" if column == "messages" else "sharegpt"
    return next((kind for kind in kinds if kind), usual) == form.name


def parse_row(value: Any, form: Form) -> Conversation | Fault:
    """Return the row that a decoded record stands for, or what is wrong with it.

    Prompts and responses must be text that is not blank. Optional columns may be absent, null or blank: all mean none.
    """
    if not isinstance(value, Mapping):
        return Fault("", f"an object with {', '.join(form.required)} expected, got {kind_of(value)}")
    return _PARSERS[form.name](value, form)


def _parse_pair(record: Mapping[str, Any], form: Form) -> Conversation | Fault:
    """Return a row with a question and its answer, in alpaca's or in other columns."""
    required = FORM_REQUIRED[form.name]
    texts: dict[str, str] = {}
    faults: list[Fault] = []
    for part, column in form.columns.items():
        content: Any = record.get(column)
        if part not in required and (content is None or content == "" or part == "tools"):
            continue
        if reason := text_fault(column, content, part in required, column in record):
            faults.append(Fault(column, reason))
        elif part in required or not content.isspace():
            texts[part] = content
    if faults:
        return Fault(", ".join(fault.field for fault in faults), "; ".join(fault.reason for fault in faults))
    return pair(texts["prompt"], texts["response"], texts.get("input", ""), texts.get("system", ""))


def _parse_prompt_completion(record: Mapping[str, Any], form: Form) -> Conversation | Fault:
    """Return a row with a prompt and a completion, each a text or a list of messages; the completion is trained."""
    columns = form.columns
    given = {part: record.get(columns[part]) for part in ("prompt", "response")}
    if not (record.get(columns["tools"]) or any(isinstance(value, list | tuple) for value in given.values())):
        return _parse_pair(record, form)
    roles = {"prompt": "user", "response": "assistant"}
    try:
        turns: dict[str, tuple[Message, ...]] = {}
        for part, value in given.items():
            listed = [{"role": roles[part], "content": value}] if isinstance(value, str) else value
            turns[part] = read_messages(listed, "messages", columns[part])
        known = tuple(message._replace(is_trained=False) for message in turns["prompt"])
        check_order((*known, *turns["response"]), columns["response"])
        return Conversation((*known, *turns["response"]), read_tools(record.get(columns["tools"])))
    except Wrong as wrong:
        return Fault(", ".join(columns[part] for part in ("prompt", "response")), str(wrong))


def _parse_turns(record: Mapping[str, Any], form: Form) -> Conversation | Fault:
    column = form.columns["messages"]
    value = record.get(column)
    if value is None:
        return Fault(column, text_fault(column, None, is_given=column in record))
    system = record.get(form.columns["system"])
    if system is not None and (reason := text_fault(form.columns["system"], system, required=False)):
        return Fault(form.columns["system"], reason)
    try:
        tools = record.get(form.columns["tools"])
        return read_conversation(value, form.name, column, tools, system if system and system.strip() else "")
    except Wrong as wrong:
        return Fault(column, str(wrong))


def _parse_text(record: Mapping[str, Any], form: Form) -> Conversation | Fault:
    column = form.columns["text"]
    reason = text_fault(column, record.get(column), is_given=column in record)
    return Fault(column, reason) if reason else Conversation((Message("text", record[column]),))


_PARSERS: Mapping[str, Callable[[Mapping[str, Any], Form], Conversation | Fault]] = {
    "alpaca": _parse_pair,
    "messages": _parse_turns,
    "sharegpt": _parse_turns,
    "prompt_completion": _parse_prompt_completion,
    "text": _parse_text,
}
