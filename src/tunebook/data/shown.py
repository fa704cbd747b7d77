"""Whether a template shows the model what a row says: its answers as they are, and all that stands before them."""

import json
import re

from tunebook.data.conversation import Conversation, Message
from tunebook.data.messages import tool_name
from tunebook.data.prompts import Turn

# Templates of reasoning models set the blanks around thoughts by themselves; between tags a text must be as it is.
_TAGS = re.compile(r"(</?\w+>)")


def find_unshown(row: Conversation, place: int, turn: Turn, tail: str = "") -> str:
    """Return what the template hides of the answer at `place`, rendered as `turn`, and before it; "" where nothing.

    `tail` is what the response has after the answer in every row.

    An answer that the template cuts, rewrites or leaves out would be trained with a stop token where the row has none.
    Thoughts count at the answer that is trained alone: leaving out those of earlier turns is how reasoning models work.
    """
    turn = turn._replace(response=turn.response.removesuffix(tail).rstrip())
    return _find_unanswered(row.messages[place], turn) or _find_unseen(row, place, turn)


def _find_unanswered(message: Message, turn: Turn) -> str:
    """Return what the response lacks of the answer: its text, its thoughts, its calls."""
    more = message.more or {}
    is_last = not more.get("tool_calls")  # calls follow the text
    if not _holds(turn, message.content, is_last):
        return f"the chat template changes or cuts the answer {message.content[:40]!r}"
    for name in ("reasoning_content", "thinking"):
        if not _holds(turn, more.get(name, "")):
            return f"the chat template does not show the answer's {name}"
    position = 0
    for call in more.get("tool_calls", ()):
        function = call["function"]
        position = turn.response.find(function["name"], position) + 1
        if not position:
            return f"the chat template does not show the call of {function['name']!r}"
        if hidden := [key for key in function["arguments"] if not _is_in(turn.response, key)]:
            return f"the chat template does not show {hidden[0]!r} of the call of {function['name']!r}"
    return ""


def _find_unseen(row: Conversation, place: int, turn: Turn) -> str:
    """Return what of the turns and tools before the answer the model would not see."""
    whole = turn.prompt + turn.response
    names = [str(tool_name(tool)) for tool in row.tools]
    for message in row.messages[:place]:
        names += [call["function"]["name"] for call in (message.more or {}).get("tool_calls", ())]
        text = message.text.strip()
        if message.role != "assistant" and not _is_in(whole, text):
            what = {"user": "what the user says", "tool": "the tool's result"}.get(message.role, "the system turn")
            return f"the chat template does not show {what}" + (f": {text[:40]!r}" if message.role != "system" else "")
    missing = [name for name in names if name not in whole]
    return f"the chat template does not show the tool {missing[0]!r}" if missing else ""


def _is_in(whole: str, text: str) -> bool:
    """Whether a text is there as it is, or as JSON writes it: so do some templates with calls and their results."""
    return text in whole or json.dumps(text, ensure_ascii=False)[1:-1] in whole


def _holds(turn: Turn, text: str, at_end: bool = False) -> bool:
    """Whether the response holds a text, or ends with it, blanks at its ends and around tags aside.

    A tag that it begins with may be the end of the prompt: some generation prompts open the thoughts themselves.
    """
    parts = [part.strip() for part in _TAGS.split(text) if part.strip()]
    if parts and _TAGS.fullmatch(parts[0]) and turn.prompt.rstrip().endswith(parts[0]):
        parts = parts[1:]
    position = 0
    for part in parts:
        found = turn.response.find(part, position)
        if found < 0:
            return False
        position = found + len(part)
    return not (at_end and parts) or turn.response.endswith(parts[-1])
