"""From text to labelled ids: prompt and response are tokenised apart, so the border between them is exact.

A prompt is tokenised alone, as generation does. A response is tokenised as what follows a prompt: without the prefix
that some tokenizers put before a text. Where no token would reach across the border this gives the ids of the joined
text; where one would (a response that begins with a line end, say), it gives what generation can produce.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from tunebook.data.conversation import Fault
from tunebook.data.prompts import PROBE, Prompts, Turn, ids_added_in_front

# A text after which another is tokenised as a continuation, tried in this order: in few tokenizers a token holds any
# of these together with what follows.
_ANCHORS = ("\n", "x", "0", ".", ")")


class EncodedTurn(NamedTuple):
    """Ids of a turn, or of several joined: the first prompt with all before it, the response with the stop token.

    Where turns are joined, `response_ids` goes on with the next prompt and response; `gaps` are the places of those
    prompts in it, which are not trained. `answer_start` is where the last response begins, counted over both lists;
    None: where the prompt ends.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    gaps: tuple[tuple[int, int], ...] = ()
    answer_start: int | None = None


def join_turns(turns: Sequence[EncodedTurn]) -> list[EncodedTurn]:
    """Return the turns of one conversation joined as far as each prompt begins with all tokens before it.

    A prompt that does not, since its template rewrites earlier turns (leaves out their thoughts, say) or a token would
    reach over the border of an earlier response, begins a row of its own: what is trained is what generation sees.
    """
    joined: list[EncodedTurn] = []
    for turn in turns:
        before = joined[-1] if joined else None
        done = before.prompt_ids + before.response_ids if before else []
        if before is None or turn.prompt_ids[: len(done)] != done:
            joined.append(turn)
            continue
        start = len(before.response_ids)
        gap = turn.prompt_ids[len(done) :]
        response_ids = [*before.response_ids, *gap, *turn.response_ids]
        gaps = (*before.gaps, (start, start + len(gap)))
        joined[-1] = EncodedTurn(before.prompt_ids, response_ids, gaps, len(turn.prompt_ids))
    return joined


def train_conversation(turns: Sequence[Turn], encoded: Sequence[EncodedTurn]) -> EncodedTurn | Fault:
    """Return a conversation of which every token is trained, each of them once: the last turn and all before it.

    Where a template rewrites earlier turns no one row holds them all: each turn would come with another history.
    """
    for before, after in pairwise(turns):
        # Blanks aside: some prompts end with one that the conversation does not have.
        if not "".join(after.prompt.split()).startswith("".join(f"{before.prompt}{before.response}".split())):
            reason = "the chat template rewrites its earlier turns, which data.train_on: all would train several times"
            return Fault("", f"{reason}; responses trains each answer once")
    return train_whole(encoded[-1])


def train_whole(turn: EncodedTurn) -> EncodedTurn:
    """Return the turn with its prompts trained like its responses."""
    start = len(turn.prompt_ids) if turn.answer_start is None else turn.answer_start
    return EncodedTurn([], turn.prompt_ids + turn.response_ids, answer_start=start)


class TurnEncoder:
    """Tokenises turns in batches on all cores with the Rust tokenizer behind a fast `transformers` tokenizer."""

    def __init__(self, tokenizer: Any, prompts: Prompts) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._leading_ids = list(prompts.leading_ids)
        self._stop_ids = [prompts.stop_token_id]
        self._ids_before_text = ids_added_in_front(tokenizer)
        self._adds_prefix = self._finds_prefix()
        self._sections = None if self._adds_prefix else _sections_of(tokenizer)
        self._token_ids = {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
        self._known_sections: dict[str, list[int]] = {}
        [probe] = prompts.render([PROBE])
        assert not isinstance(probe, Fault), "the prompts were built with this row"
        self._learn_sections(probe[0].prompt)

    def encode(self, turns: Sequence[Turn]) -> list[EncodedTurn]:
        """Return the ids of each turn, in order."""
        plain = [turn for turn in turns if not turn.marked and not turn.is_text]
        prompts = iter(self._encode_prompts([turn.prompt for turn in plain]))
        responses = iter(self._encode_continuations([turn.response for turn in plain]))
        texts = iter(self._encode_texts([turn.response for turn in turns if turn.is_text]))
        return [
            next(texts)
            if turn.is_text
            else self._encode_marked(turn)
            if turn.marked
            else EncodedTurn(self._leading_ids + next(prompts), next(responses) + self._stop_ids)
            for turn in turns
        ]

    def _encode_texts(self, texts: Sequence[str]) -> list[EncodedTurn]:
        """Return plain texts with one BOS, where the tokenizer puts one, and one eos token, which may be written."""
        before, end = self._ids_before_text, [self._tokenizer.eos_token_id]
        written = self._tokenizer.bos_token if before == [self._tokenizer.bos_token_id] else ""
        all_ids = self._encode([text.removeprefix(written) for text in texts])
        return [EncodedTurn([], before + (ids if ids[-1:] == end else ids + end)) for ids in all_ids]

    def _learn_sections(self, prompt: str) -> None:
        """Remember the ids of what stands between the added tokens of a prompt, to make them once.

        A chat template writes the same text around every row (a system turn, role names). Texts between added tokens
        are tokenised independently of each other; where this prompt shows that they are not, nothing is remembered.
        """
        if self._sections is None:
            return
        parts = self._sections.split(prompt)
        texts = sorted({part for part in parts[::2] if part})
        self._known_sections = dict(zip(texts, self._encode(texts), strict=True))
        if self._encode([prompt]) != [self._join(parts, self._known_sections)]:
            self._sections, self._known_sections = None, {}

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, added tokens recognised, nothing added in front or behind."""
        # transformers leaves the settings of its last call on the backend, and a tokenizer.json may bring its own.
        self._backend.encode_special_tokens = False
        self._backend.no_truncation()
        self._backend.no_padding()
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _finds_prefix(self) -> bool:
        """Whether the tokenizer puts a prefix before a text that it does not put inside one (SentencePiece)."""
        newline, letter, digit, with_letter, with_digit = self._encode(["\n", "a", "1", "\na", "\n1"])
        return newline + letter != with_letter or newline + digit != with_digit

    def _encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        if self._sections is None:
            return self._encode(prompts)
        split = [self._sections.split(prompt) for prompt in prompts]
        new = {part for parts in split for part in parts[::2] if part and part not in self._known_sections}
        sections = self._known_sections | dict(zip(new, self._encode(list(new)), strict=True))
        return [self._join(parts, sections) for parts in split]

    def _join(self, parts: Sequence[str], sections: dict[str, list[int]]) -> list[int]:
        """Return the ids of a text that was split at its added tokens: text, token, text, token, ..., text."""
        ids: list[int] = []
        for index, part in enumerate(parts):
            if index % 2:
                ids.append(self._token_ids[part])
            elif part:
                ids += sections[part]
        return ids

    def _encode_continuations(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text as it stands after another text."""
        if not self._adds_prefix:
            return self._encode(texts)
        ids: list[list[int] | None] = [None] * len(texts)
        for anchor in _ANCHORS:
            left = [index for index, found in enumerate(ids) if found is None]
            if not left:
                break
            anchor_ids, *anchored = self._encode([anchor, *(anchor + texts[index] for index in left)])
            for index, whole in zip(left, anchored, strict=True):
                if whole[: len(anchor_ids)] == anchor_ids:
                    ids[index] = whole[len(anchor_ids) :]
        return [self._encode([text])[0] if found is None else found for text, found in zip(texts, ids, strict=True)]

    def _encode_marked(self, turn: Turn) -> EncodedTurn:
        """Return the ids of a turn with control tokens in the row's own text: those are encoded as plain text."""
        from transformers.utils.chat_template_utils import encode_marked_chat

        prompt_ids = encode_marked_chat(self._tokenizer, turn.prompt)
        newline = self._encode(["\n"])[0]
        response_ids = encode_marked_chat(self._tokenizer, "\n" + turn.response)
        if response_ids[: len(newline)] == newline:
            response_ids = response_ids[len(newline) :]
        else:
            response_ids = encode_marked_chat(self._tokenizer, turn.response)
        return EncodedTurn(self._leading_ids + prompt_ids, response_ids + self._stop_ids)


def _sections_of(tokenizer: Any) -> re.Pattern[str] | None:
    """Return the pattern that splits a text at its added tokens as the tokenizer does; None where it does more.

    A token that takes the blanks beside it along, wants word borders or is looked for in normalised text is left to the
    tokenizer itself.
    """
    added = list(tokenizer.added_tokens_decoder.values())
    if not added or any(token.lstrip or token.rstrip or token.single_word or token.normalized for token in added):
        return None
    longest_first = sorted((token.content for token in added), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")
