"""What somebody meant who wrote another word."""

from collections.abc import Sequence

# Longer than any name that is known here. Comparing takes the time of both lengths multiplied.
LONGEST_COMPARED = 100


def near_words(written: str, words: Sequence[str], n: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return up to `n` of the words that are spelt alike, nearest first; none for what is too long to be one."""
    from difflib import get_close_matches

    return get_close_matches(written, words, n=n, cutoff=cutoff) if len(written) <= LONGEST_COMPARED else []
