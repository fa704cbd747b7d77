"""A row in the one form that everything after reading works on: a conversation, or a plain text."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

TrainOn = Literal["responses", "last_response", "all"]
_SHOWN_CHARS = 40


class Message(NamedTuple):
    """One turn of a conversation.

    `role` is system, user, assistant or tool; text for a row that is no conversation. `input` is what a user's message
    is about where the data keeps it apart (Alpaca). `more` holds what else a chat template may show: tool_calls,
    tool_call_id, name, reasoning_content. `is_trained` is False for an assistant's turn that the data excludes.
    """

    role: str
    content: str
    input: str = ""
    more: Mapping[str, Any] | None = None
    is_trained: bool = True

    @property
    def text(self) -> str:
        """What is said: the content, and the input after a blank line if there is one."""
        return f"{self.content}\n\n{self.input}" if self.input else self.content

    def for_template(self) -> dict[str, Any]:
        """Return the message as a chat template takes it."""
        return {"role": self.role, "content": self.text, **(self.more or {})}


class Conversation(NamedTuple):
    """The turns of one row in order, and the tools that the assistant was offered."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def is_plain_text(self) -> bool:
        """Whether the row is one text and no conversation."""
        return self.messages[0].role == "text"

    @property
    def is_plain_pair(self) -> bool:
        """Whether the row is one question and one answer, with nothing else that a template could show."""
        return (
            len(self.messages) == 2
            and self.messages[0].role == "user"
            and not self.tools
            and not (self.messages[0].more or self.messages[1].more)
        )

    @property
    def begins(self) -> str:
        """How the row begins, short enough to be quoted."""
        return self.messages[0].content[:60]

    @property
    def num_chars(self) -> int:
        """Characters of all contents."""
        return sum(len(message.content) + len(message.input) for message in self.messages)

    def trained_turns(self, train_on: TrainOn) -> list[int]:
        """Return the places of the assistant's turns that are trained."""
        places = [place for place, message in enumerate(self.messages) if message.role == "assistant"]
        if train_on == "last_response":
            places = places[-1:]
        return [place for place in places if self.messages[place].is_trained]


def pair(question: str, answer: str, input: str = "", system: str = "") -> Conversation:
    """Return the conversation of one question and its answer."""
    messages = (Message("user", question, input), Message("assistant", answer))
    return Conversation((Message("system", system), *messages) if system else messages)


class Fault(NamedTuple):
    """Why a record is no usable row; `field` names the columns concerned and is empty for the record as a whole."""

    field: str
    reason: str


def text_fault(name: str, content: Any, required: bool = True, is_given: bool = True) -> str:
    """Return what is wrong with a text, or an empty string; `is_given` says whether its key was there at all."""
    if not isinstance(content, str):
        if content is None:
            return f"{name} is null" if is_given else f"{name} is missing"
        return f"{name} is {kind_of(content)}, text expected"
    if required and (not content or content.isspace()):
        return f"{name} is blank" if content else f"{name} is empty"
    if content.isascii():
        return ""
    place = surrogate_place(content)
    return f"{name} has a lone surrogate or bytes that are not UTF-8 (character {place})" if place else ""


def surrogate_place(text: str) -> int:
    """Return where a text has a character that UTF-8 can't write, counted from 1; 0 where it has none."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return error.start + 1
    return 0


def kind_of(value: Any) -> str:
    """Return the JSON kind of a value, with the value where it is short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the text {value[:_SHOWN_CHARS]!r}"
    if isinstance(value, int | float):
        return f"the number {str(value)[:_SHOWN_CHARS]}"
    if isinstance(value, list | tuple):
        return "a list"
    return "an object" if isinstance(value, Mapping) else f"a {type(value).__name__}"
