"""From a row to text: the prompt that the model sees at generation, and the response it is to give.

The border between the two is a position in the rendered text, found by rendering the prompt alone the way generation
does, never by searching for a marker. The token that ends the turn is kept apart from the text and added as an id.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from tunebook.data.formats import AlpacaRow
from tunebook.data.turn_shape import TurnShape, find_turn_shape
from tunebook.errors import Problem, Refused

# The wording is part of the form: models tuned on Alpaca data know exactly this text (Stanford Alpaca, 2023).
_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
# Words that no template treats specially, to see what a template puts around them.
PROBE = AlpacaRow("tunebook probe question", "", "tunebook probe answer")


class Turn(NamedTuple):
    """A rendered row: `response` is the text up to the token that ends the turn, which is not part of it.

    `marked` says that the row's own text holds control tokens of the tokenizer, which transformers'
    `mark_control_tokens` has marked so that they are encoded as the plain text they are.
    """

    prompt: str
    response: str
    marked: bool = False


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

    def render(self, rows: Sequence[AlpacaRow]) -> list[Turn]:
        """Return the rows as turns, in order."""


def build_prompts(tokenizer: Any, template: str) -> Prompts:
    """Return the way to prompt this model: its chat template, or the Alpaca text where it has none or is told to.

    `template` is `data.template` ("auto" or "alpaca"). Raises `Refused` where the chat template can't be trained with,
    or no token ends a turn.
    """
    if template == "auto" and tokenizer.chat_template is not None:
        return ChatPrompts(tokenizer)
    return AlpacaPrompts(tokenizer)


def find_stop_token(tokenizer: Any, template: str) -> int:
    """Return the id of the token that ends a turn under `data.template`, the one that generation has to stop at."""
    return build_prompts(tokenizer, template).stop_token_id


class AlpacaPrompts:
    """The classic Alpaca text; the turn ends with the eos token."""

    name = "alpaca text"
    source = _WITH_INPUT + _WITHOUT_INPUT

    def __init__(self, tokenizer: Any) -> None:
        self.stop_token_id = _eos_token_id(tokenizer)
        self.leading_ids = _ids_added_in_front(tokenizer)
        self._control_tokens = _any_of(_control_tokens(tokenizer, self.source))

    def render(self, rows: Sequence[AlpacaRow]) -> list[Turn]:
        """Return the rows as turns, in order."""
        turns = []
        for row in rows:
            fields, marked = _mark(row, self._control_tokens)
            text = _WITH_INPUT if fields.input else _WITHOUT_INPUT
            prompt = text.format(instruction=fields.instruction, input=fields.input)
            turns.append(Turn(prompt, fields.output, marked))
        return turns


class ChatPrompts:
    """The chat template of the model: the row is a user's message and the assistant's answer.

    What the template puts around the answer is learnt from one probe row and has to hold for every other: the text
    after it up to the first added token belongs to the response, that token ends the turn, and the rest is cut.
    """

    name = "chat template of the model"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.leading_ids: list[int] = []  # a chat template writes its own BOS, and generation adds none to it
        try:
            self.source: str = tokenizer.get_chat_template()
        except ValueError as error:  # several named templates and no default
            raise Refused(_template_problem(str(error).splitlines()[0])) from error
        self._control_tokens = _any_of(_control_tokens(tokenizer, self.source))
        ((prompt, full),) = self._render_texts([PROBE])
        before, answer, self._tail = _response_text(prompt, full).partition(PROBE.output)
        for is_shown, what in ((PROBE.question in prompt, "user's message"), (answer, "assistant's answer")):
            if not is_shown:
                raise Refused(_template_problem(f"it does not show the {what}"))
        self._kept_tail, self.stop_token_id = _find_turn_end(tokenizer, self._tail)
        self._shape = find_turn_shape(tokenizer, self.source)
        if self._shape and self._join(self._shape, PROBE) != (prompt, before + answer):
            self._shape = None

    def render(self, rows: Sequence[AlpacaRow]) -> list[Turn]:
        """Return the rows as turns, in order. Raises `Refused` where the template treats a row unlike the others."""
        fields, marked = zip(*(_mark(row, self._control_tokens) for row in rows), strict=True)
        shape = self._shape
        texts = [self._join(shape, row) for row in fields] if shape else self._split_rendered(fields)
        return [
            Turn(prompt, response + self._kept_tail, is_marked)
            for (prompt, response), is_marked in zip(texts, marked, strict=True)
        ]

    def _join(self, shape: TurnShape, row: AlpacaRow) -> tuple[str, str]:
        """Return prompt and response of a row by a shape that holds for every row, the response without its tail."""
        return f"{shape.before}{row.question}{shape.between}", f"{shape.lead}{row.output}"

    def _split_rendered(self, rows: Sequence[AlpacaRow]) -> list[tuple[str, str]]:
        """Return prompt and response of each row as the template renders them, the response without its tail."""
        texts = []
        for (prompt, full), row in zip(self._render_texts(rows), rows, strict=True):
            response = _response_text(prompt, full)
            if not response.endswith(self._tail):
                raise Refused(_template_problem(f"it ends the turn in another way for {_quote(row)}"))
            texts.append((prompt, response[: len(response) - len(self._tail)]))
        return texts

    def _render_texts(self, rows: Sequence[AlpacaRow]) -> list[tuple[str, str]]:
        """Return for each row the prompt as generation renders it, and the whole conversation."""
        questions = [[{"role": "user", "content": row.question}] for row in rows]
        whole = [
            [*question, {"role": "assistant", "content": row.output}]
            for question, row in zip(questions, rows, strict=True)
        ]
        render = self._tokenizer.apply_chat_template
        try:
            prompts = render(questions, tokenize=False, add_generation_prompt=True)
            return list(zip(prompts, render(whole, tokenize=False), strict=True))
        except Exception as error:  # a template is a program from elsewhere and may raise anything
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise Refused(_template_problem(f"it fails on a user's message and an answer: {reason}")) from error


def _response_text(prompt: str, full: str) -> str:
    """Return what the whole conversation has beyond the generation prompt.

    Some templates end the prompt with a blank that the conversation doesn't have: the blank stays in the prompt, as at
    generation. Raises `Refused` where the conversation goes on in any other way than the prompt begins it.
    """
    if full.startswith(prompt):
        return full[len(prompt) :]
    pairs = enumerate(zip(prompt, full, strict=False))
    common = next((index for index, (left, right) in pairs if left != right), len(full))
    rest = prompt[common:]
    if rest.isspace():
        return full[common:]
    raise Refused(_template_problem(f"its generation prompt goes on with {rest[:40]!r}, which no answer follows"))


def _find_turn_end(tokenizer: Any, tail: str) -> tuple[str, int]:
    """Return the text between an answer and the token that ends the turn, and the id of that token.

    It is the first added token that the template writes after the answer (ChatML: <|im_end|>). A template without one
    gets the eos token.
    """
    added = _any_of(token.content for token in tokenizer.added_tokens_decoder.values())
    found = added.search(tail)
    if found:
        return tail[: found.start()], int(tokenizer.convert_tokens_to_ids(found.group()))
    return tail.rstrip(), _eos_token_id(tokenizer)


def _eos_token_id(tokenizer: Any) -> int:
    if tokenizer.eos_token_id is None:
        message = "no token ends a turn: the tokenizer has no eos token and its chat template writes none"
        raise Refused(Problem(message, "Set eos_token in tokenizer_config.json", key="model.name_or_path"))
    return int(tokenizer.eos_token_id)


def _ids_added_in_front(tokenizer: Any) -> list[int]:
    """Return the ids that the tokenizer itself puts before a text, usually the BOS or nothing."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a", add_special_tokens=True)
    starts = (start for start in range(len(whole)) if whole[start : start + len(plain)] == plain)
    return list(whole[: next(starts, 0)])


def _control_tokens(tokenizer: Any, template: str) -> list[str]:
    """Return the added tokens that mean something to the template: special ones, and those that its text names.

    Tokens of blanks only (Gemma's line ends) are ordinary text. transformers' `sanitize_control_tokens` has this rule.
    """
    added = tokenizer.added_tokens_decoder.values()
    return [
        token.content for token in added if token.special or (token.content in template and not token.content.isspace())
    ]


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for any of the tokens, the longest first; it never matches where there are none."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _mark(row: AlpacaRow, control_tokens: re.Pattern[str]) -> tuple[AlpacaRow, bool]:
    """Return the row with its control tokens marked, and whether there were any."""
    if not any(control_tokens.search(text) for text in row):
        return row, False
    from transformers.utils.chat_template_utils import mark_control_tokens

    return AlpacaRow(*(mark_control_tokens(text, control_tokens) for text in row)), True


def _quote(row: AlpacaRow) -> str:
    return f"the row that begins {row.instruction[:60]!r}"


def _template_problem(reason: str) -> Problem:
    message = f"the model's chat template can't be trained with: {reason}"
    return Problem(message, "Set data.template: alpaca, or mend the template", key="data.template")
