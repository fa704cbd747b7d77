"""Rows as they will be trained, to be read: which tokens count, special tokens and control characters visible."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from tunebook.data.labels import IGNORED

LONGEST_SHOWN = 600  # characters of one segment
TRAINED_STYLE, SPECIAL_STYLE = "bold green", "cyan"


@dataclass(frozen=True)
class Segment:
    """Tokens in a row that are all trained, or all not; each piece is a text and whether it is a special token."""

    trained: bool
    num_tokens: int
    pieces: tuple[tuple[str, bool], ...]

    @property
    def text(self) -> str:
        """The tokens as text, escaped."""
        return "".join(piece for piece, _ in self.pieces)


def view_row(input_ids: Sequence[int], labels: Sequence[int], tokenizer: Any) -> tuple[Segment, ...]:
    """Return a prepared row as segments, in order; together they hold every token of the row once."""
    segments: list[Segment] = []
    start = 0
    for end in range(1, len(input_ids) + 1):
        trained = labels[start] != IGNORED
        if end == len(input_ids) or (labels[end] != IGNORED) != trained:
            segments.append(Segment(trained, end - start, _pieces(input_ids[start:end], tokenizer)))
            start = end
    return tuple(segments)


def escape_text(text: str) -> str:
    r"""Return a text on one line in which nothing is hidden: `\n`, `\t` and every other character without a shape.

    A backslash is doubled, so that what is escaped can be told from what stands in the row.
    """
    return "".join(_escaped(character) for character in text)


def render_rows(rows: Sequence[tuple[str, Sequence[Segment]]]) -> Text:
    """Return rows, each under its title, one line for each segment: `+` before what is trained, and colours."""
    shown = Text()
    for title, segments in rows:
        num_trained = sum(segment.num_tokens for segment in segments if segment.trained)
        whole = sum(segment.num_tokens for segment in segments)
        shown.append(f"{title}: {whole:,} tokens, {num_trained:,} of them trained (+)\n", style="dim")
        for segment in segments:
            shown.append("  + " if segment.trained else "  | ", style=TRAINED_STYLE if segment.trained else "dim")
            for text, special in _shortened(segment.pieces):
                style = TRAINED_STYLE if segment.trained else ""
                shown.append(text, style=f"{style} {SPECIAL_STYLE}".strip() if special else style)
            shown.append("\n")
    return shown


def _pieces(ids: Sequence[int], tokenizer: Any) -> tuple[tuple[str, bool], ...]:
    """Return the text of ids, special tokens apart, so that a text that only looks like one is not shown as one."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    pieces: list[tuple[str, bool]] = []
    start = 0
    for end in range(1, len(ids) + 1):
        is_special = ids[start] in special
        if end == len(ids) or is_special or ids[end] in special:
            text = tokenizer.decode(ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            pieces.append((escape_text(text), is_special))
            start = end
    return tuple(pieces)


def _escaped(character: str) -> str:
    if character == "\\":
        return "\\\\"
    if character.isprintable():
        return character
    named = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    if character in named:
        return named[character]
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _shortened(pieces: Sequence[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Return the pieces of a segment with its middle left out where it is long, special tokens at both ends kept."""
    whole = sum(len(text) for text, _ in pieces)
    if whole <= LONGEST_SHOWN:
        return list(pieces)
    half = LONGEST_SHOWN // 2
    gap = (f" ... {whole - 2 * half:,} characters ... ", False)
    before, after = _first(pieces, half), _first([(text[::-1], special) for text, special in reversed(pieces)], half)
    return [*before, gap, *((text[::-1], special) for text, special in reversed(after))]


def _first(pieces: Sequence[tuple[str, bool]], length: int) -> list[tuple[str, bool]]:
    kept = []
    for text, special in pieces:
        if length <= 0:
            break
        kept.append((text[:length], special))
        length -= len(text)
    return kept
