"""An answer shown while it is written, a piece at a time, each made of whole characters."""

import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from transformers.generation.streamers import BaseStreamer

# What a decoder writes for bytes that are no character, or not yet.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class ShownAnswer(BaseStreamer):  # type: ignore[misc]
    """Takes the tokens of one answer as generation makes them, and shows the text that is certain.

    A character may span several tokens: while the text ends in an unfinished one, nothing of it is shown.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[int], show: Callable[[str], None]) -> None:
        self._tokenizer, self._stops, self._show = tokenizer, frozenset(stops), show
        self._is_prompt = True
        self._num_shown = 0
        self.ids: list[int] = []

    @property
    def text(self) -> str:
        """The answer so far."""
        # Llama 3's tokenizer would else take blanks before full stops away again, once they are shown.
        return str(self._tokenizer.decode(self.ids, clean_up_tokenization_spaces=False))

    def put(self, value: Any) -> None:
        """Take the prompt, which comes first and is not shown, or the next tokens."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self.ids += [token for token in value.flatten().tolist() if token not in self._stops]
        text = self.text
        if not text.endswith(_UNFINISHED):
            self._show_beyond(text)

    def end(self) -> None:
        """Show what is left: the answer may end with bytes that are no character."""
        self._show_beyond(self.text)

    def _show_beyond(self, text: str) -> None:
        if len(text) > self._num_shown:
            self._show(text[self._num_shown :])
            self._num_shown = len(text)


def without_controls(text: str) -> str:
    """Return a text without the control characters that a terminal would obey; line ends and tabs stay."""
    kept = (character in "\n\t" or unicodedata.category(character) != "Cc" for character in text)
    return "".join(one if is_kept else _UNFINISHED for one, is_kept in zip(text, kept, strict=True))
