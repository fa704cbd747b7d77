"""From a row to text: the prompts that the model sees at generation, and the responses it is to give.

The border between the two is a position in the rendered text, found by rendering the prompt alone the way generation
does, never by searching for a marker. The token that ends the turn is kept apart from the text and added as an id.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from tunebook.data.conversation import Conversation, Fault, TrainOn, pair
from tunebook.errors import Problem, Refused

# The wording is part of the form: models tuned on Alpaca data know exactly this text (Stanford Alpaca, 2023).
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
# Words that no template treats specially, to see what a template puts around them.
PROBE = pair("tunebook probe question", "tunebook probe answer")


class Turn(NamedTuple):
    """A response and all that stands before it, rendered; the token that ends the turn is not part of the response.

    `marked` says that the row's own text holds control tokens of the tokenizer, which transformers'
    `mark_control_tokens` has marked so that they are encoded as the plain text they are. `is_text` is a plain text,
    which has no prompt and whose tokens count as they are written.
    """

    prompt: str
    response: str
    marked: bool = False
    is_text: bool = False


Rendered = list[Turn] | Fault


class Prompts(Protocol):
    """How rows become text for one model."""

    @property
    def name(self) -> str:
        """What the template is called in reports."""

    @property
    def source(self) -> str:
        """The template's text, all of it that can change what is trained."""

    @property
    def stop_token_id(self) -> int:
        """The id of the token that ends a turn: the last label of every whole row, and what generation stops at."""

    @property
    def leading_ids(self) -> list[int]:
        """Ids before the prompt's text that the text doesn't hold itself, such as a BOS that the tokenizer adds."""

    def render(self, rows: Sequence[Conversation], train_on: TrainOn = "responses") -> list[Rendered]:
        """Return for each row its trained turns in order, or why it can't be shown to the model."""


class AlpacaPrompts:
    """The classic Alpaca text; the turn ends with the eos token."""

    name = "alpaca text"
    source = ALPACA_WITH_INPUT + ALPACA_WITHOUT_INPUT

    def __init__(self, tokenizer: Any) -> None:
        self.stop_token_id = eos_token_id(tokenizer)
        self.leading_ids = ids_added_in_front(tokenizer)
        self._control_tokens = any_of(control_tokens(tokenizer, self.source))

    def render(self, rows: Sequence[Conversation], train_on: TrainOn = "responses") -> list[Rendered]:
        """Return each row as its one turn; a row that is more than a question and an answer is a fault."""
        return [self._render_row(row) for row in rows]

    def _render_row(self, row: Conversation) -> Rendered:
        if row.is_plain_text:
            return [text_turn(row)]
        if not row.is_plain_pair:
            return Fault("", f"the Alpaca text has one question and one answer; this row has {_described(row)}")
        fields, marked = _marked(row, self._control_tokens)
        user, assistant = fields.messages
        text = ALPACA_WITH_INPUT if user.input else ALPACA_WITHOUT_INPUT
        return [Turn(text.format(instruction=user.content, input=user.input), assistant.content, marked)]


def text_turn(row: Conversation) -> Turn:
    """Return a plain text as a turn without a prompt."""
    return Turn("", row.messages[0].content, is_text=True)


def eos_token_id(tokenizer: Any) -> int:
    """Return the id of the eos token. Raises `Refused` where there is none."""
    if tokenizer.eos_token_id is None:
        message = "no token ends a turn: the tokenizer has no eos token and its chat template writes none"
        raise Refused(Problem(message, "Set eos_token in tokenizer_config.json", key="model.name_or_path"))
    return int(tokenizer.eos_token_id)


def ids_added_in_front(tokenizer: Any) -> list[int]:
    """Return the ids that the tokenizer itself puts before a text, usually the BOS or nothing."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a", add_special_tokens=True)
    starts = (start for start in range(len(whole)) if whole[start : start + len(plain)] == plain)
    return list(whole[: next(starts, 0)])


def control_tokens(tokenizer: Any, template: str) -> list[str]:
    """Return the added tokens that mean something to the template: special ones, and those that its text names.

    Tokens of blanks only (Gemma's line ends) are ordinary text. transformers' `sanitize_control_tokens` has this rule.
    """
    added = tokenizer.added_tokens_decoder.values()
    return [
        token.content for token in added if token.special or (token.content in template and not token.content.isspace())
    ]


def special_tokens(tokenizer: Any) -> list[str]:
    """Return the added tokens that are special: those that no answer may hold as tokens."""
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]


def make_special(tokenizer: Any, token_id: int) -> None:
    """Make an added token special: who decodes without special tokens does not see it, and no text is read as it.

    Its id and how it is found stay as they are. A token of the ordinary vocabulary is left alone.
    """
    from tokenizers import AddedToken

    token = tokenizer.added_tokens_decoder.get(token_id)
    if token is not None and not token.special:
        kept = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        tokenizer.add_tokens([AddedToken(token.content, special=True, **kept)], special_tokens=True)


def any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for any of the tokens, the longest first; it never matches where there are none."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def mark_row(row: Conversation, asked: re.Pattern[str], answered: re.Pattern[str]) -> tuple[Conversation, bool]:
    """Return the row with its control tokens marked, and whether there were any.

    `answered` are those of the assistant's turns, `asked` those of everything else. An answer may hold tokens that are
    not special, since the model writes them itself: those around its thoughts or its tool calls.
    """
    if not (row.tools and _holds(row.tools, asked)):
        for message in row.messages:
            tokens = answered if message.role == "assistant" else asked
            if tokens.search(message.content) or (message.input and tokens.search(message.input)):
                break
            if message.more and _holds(message.more, tokens):
                break
        else:
            return row, False
    messages = []
    for message in row.messages:
        tokens = answered if message.role == "assistant" else asked
        content, given, more = (_mark(value, tokens) for value in (message.content, message.input, message.more))
        messages.append(message._replace(content=content, input=given, more=more))
    return Conversation(tuple(messages), tuple(_mark(row.tools, asked))), True


def _mark(value: Any, tokens: re.Pattern[str]) -> Any:
    """Return a nested value with the tokens in all of its texts marked, in keys as well, which transformers leaves."""
    from transformers.utils.chat_template_utils import mark_control_tokens

    if isinstance(value, dict):
        return {mark_control_tokens(key, tokens): _mark(inner, tokens) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_mark(inner, tokens) for inner in value]
    return mark_control_tokens(value, tokens)


def _holds(value: Any, tokens: re.Pattern[str]) -> bool:
    """Whether a nested value has one of the tokens in a text or a key."""
    if isinstance(value, str):
        return bool(tokens.search(value))
    inner: Iterable[Any] = value if isinstance(value, list | tuple) else ()
    if isinstance(value, dict):
        inner = [*value, *value.values()]
    return any(_holds(one, tokens) for one in inner)


def _marked(row: Conversation, tokens: re.Pattern[str]) -> tuple[Conversation, bool]:
    return mark_row(row, tokens, tokens)


def _described(row: Conversation) -> str:
    if row.tools or any(message.more for message in row.messages):
        return "tools"
    roles = [message.role for message in row.messages]
    return "a system turn" if "system" in roles else f"{len(roles)} turns"
