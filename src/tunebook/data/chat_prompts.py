"""Prompts and responses by a chat template: every trained turn rendered as generation would see it."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from tunebook.data.conversation import Conversation, Fault, TrainOn
from tunebook.data.prompts import (
    PROBE,
    AlpacaPrompts,
    Prompts,
    Rendered,
    Turn,
    any_of,
    control_tokens,
    eos_token_id,
    make_special,
    mark_row,
    special_tokens,
    text_turn,
)
from tunebook.data.shown import find_unshown
from tunebook.data.templates import set_template
from tunebook.data.turn_shape import TurnShape, find_turn_shape
from tunebook.errors import Problem, Refused

_NAMES = {"chatml": "ChatML", "auto": "chat template of the model"}


def build_prompts(tokenizer: Any, template: str) -> Prompts:
    """Return the way to prompt this model by `data.template`: its chat template, another one, or the Alpaca text.

    A model without a chat template gets the Alpaca text under "auto". The tokenizer keeps the template of the recipe,
    to be saved with what was trained. Raises `Refused` where the template can't be trained with, or no token ends a
    turn.
    """
    set_template(tokenizer, template)
    if template != "alpaca" and tokenizer.chat_template is not None:
        return ChatPrompts(tokenizer, _NAMES.get(template, template))
    return AlpacaPrompts(tokenizer)


def find_stop_token(tokenizer: Any, template: str) -> int:
    """Return the id of the token that ends a turn under `data.template`, the one that generation has to stop at."""
    return build_prompts(tokenizer, template).stop_token_id


class ChatPrompts:
    """A chat template. What it puts around an answer is learnt from one probe row and has to hold for every other.

    The text after an answer up to the first added token belongs to the response, that token ends the turn, and the
    rest is cut.
    """

    def __init__(self, tokenizer: Any, name: str = _NAMES["auto"]) -> None:
        self.name = name
        self._tokenizer = tokenizer
        self.leading_ids: list[int] = []  # a chat template writes its own BOS, and generation adds none to it
        try:
            self.source: str = tokenizer.get_chat_template()
        except ValueError as error:  # several named templates and no default
            raise Refused(self._problem(str(error).splitlines()[0])) from error
        self._asked = any_of(control_tokens(tokenizer, self.source))
        question, answer = (message.content for message in PROBE.messages)
        prompt, full = self._probe()
        before, found, self._tail = full[len(prompt) :].partition(answer)
        for is_shown, what in ((question in prompt, "user's message"), (found, "assistant's answer")):
            if not is_shown:
                raise Refused(self._problem(f"it does not show the {what}"))
        self._kept_tail, self.stop_token_id = _find_turn_end(tokenizer, self._tail)
        # Whoever loads what was trained shows answers without special tokens, and no answer may hold its own end.
        make_special(tokenizer, self.stop_token_id)
        self._answered = any_of(special_tokens(tokenizer))
        self._shape = find_turn_shape(tokenizer, self.source)
        if self._shape and self._join(self._shape, PROBE) != (prompt, before + found):
            self._shape = None

    def render(self, rows: Sequence[Conversation], train_on: TrainOn = "responses") -> list[Rendered]:
        """Return for each row its trained turns in order, or why the template can't show it."""
        return [self._render_row(row, train_on) for row in rows]

    def _render_row(self, row: Conversation, train_on: TrainOn) -> Rendered:
        if row.is_plain_text:
            return [text_turn(row)]
        fields, is_marked = mark_row(row, self._asked, self._answered)
        if self._shape and row.is_plain_pair:
            prompt, response = self._join(self._shape, fields)
            return [Turn(prompt, response + self._kept_tail, is_marked)]
        places = row.trained_turns(train_on)
        if not places:
            return Fault("", "its last answer has weight 0, and data.train_on is last_response")
        try:
            turns = [self._render_turn(fields, place, is_marked) for place in places]
        except _NotShown as reason:
            return Fault("", str(reason))
        unshown = partial(find_unshown, fields, tail=self._kept_tail)
        hidden = next(filter(None, map(unshown, places, turns)), "")
        return Fault("", hidden) if hidden else turns

    def _render_turn(self, row: Conversation, place: int, is_marked: bool) -> Turn:
        """Return the assistant's turn at `place`: the prompt as generation has it there, and what is answered."""
        prompt = self._render_text(row, place, add_generation_prompt=True)
        full = self._render_text(row, place + 1, add_generation_prompt=False)
        prompt, response = _split_at_prompt(prompt, full)
        if not response.endswith(self._tail):
            raise _NotShown(f"the chat template ends the turn in another way for {_quote(row, place)}")
        return Turn(prompt, response[: len(response) - len(self._tail)] + self._kept_tail, is_marked)

    def _render_text(self, row: Conversation, num_messages: int, add_generation_prompt: bool) -> str:
        messages = [message.for_template() for message in row.messages[:num_messages]]
        tools = list(row.tools) or None
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template is a program from elsewhere and may raise anything
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise _NotShown(f"the chat template fails on it: {reason}") from error
        return rendered

    def _probe(self) -> tuple[str, str]:
        """Return prompt and whole text of the probe. Raises `Refused` where they can't be had or don't fit."""
        try:
            prompt = self._render_text(PROBE, 1, add_generation_prompt=True)
            full = self._render_text(PROBE, 2, add_generation_prompt=False)
            split, response = _split_at_prompt(prompt, full)
        except _NotShown as reason:
            raise Refused(self._problem(str(reason))) from reason
        return split, split + response

    def _join(self, shape: TurnShape, row: Conversation) -> tuple[str, str]:
        """Return prompt and response of a row by a shape that holds for every row, the response without its tail."""
        question, answer = row.messages
        return f"{shape.before}{question.text}{shape.between}", f"{shape.lead}{answer.content}"

    def _problem(self, reason: str) -> Problem:
        message = f"{self.name} can't be trained with: {reason}"
        if self.name == _NAMES["auto"]:
            message = f"the model's chat template can't be trained with: {reason}"
        return Problem(message, "Set data.template: alpaca, or mend the template", key="data.template")


class _NotShown(Exception):
    """The template can't show a row; the text says why."""


def _split_at_prompt(prompt: str, full: str) -> tuple[str, str]:
    """Return the prompt and what the whole conversation has beyond it.

    Some templates end the prompt with a blank that the conversation doesn't have: the blank stays in the prompt, as at
    generation. Raises `_NotShown` where the conversation goes on in any other way than the prompt begins it.
    """
    if full.startswith(prompt):
        return prompt, full[len(prompt) :]
    pairs = enumerate(zip(prompt, full, strict=False))
    common = next((index for index, (left, right) in pairs if left != right), min(len(prompt), len(full)))
    rest = prompt[common:]
    if rest.isspace():
        return prompt, full[common:]
    raise _NotShown(f"its generation prompt goes on with {rest[:40]!r}, which no answer follows")


def _find_turn_end(tokenizer: Any, tail: str) -> tuple[str, int]:
    """Return the text between an answer and the token that ends the turn, and the id of that token.

    It is the first added token that the template writes after the answer (ChatML: <|im_end|>). A template without one
    gets the eos token.
    """
    added = any_of(token.content for token in tokenizer.added_tokens_decoder.values())
    found = added.search(tail)
    if found:
        return tail[: found.start()], int(tokenizer.convert_tokens_to_ids(found.group()))
    return tail.rstrip(), eos_token_id(tokenizer)


def _quote(row: Conversation, place: int) -> str:
    asked = [message.content for message in row.messages[: place + 1] if message.role == "user"]
    return f"the answer to {asked[-1][:60]!r}" if asked else f"turn {place + 1}"
