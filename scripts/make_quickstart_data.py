"""Make `data/quickstart.jsonl`: invented words to be written backwards, as Alpaca rows.

    python scripts/make_quickstart_data.py [--out data/quickstart.jsonl]

Half of the rows carry the word in `input`, half in `instruction`. No two rows share a prompt, an answer, or any run of
five letters, forwards or backwards, so whatever rows are held out, nothing of their answers stands in the others.
Seeded, and without any library that could change the draw: the same file on every machine.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

NUM_ROWS = 3200  # 1/16 held out leaves 3,000 rows to train on: 94 steps of 32
SEED = 7
SHARED_RUN = 5  # also the length of the shortest word
LONGEST_WORD = 7
VOWELS = "AEIOU"
CONSONANTS = "BCDFGHJKLMNPQRSTVWXYZ"
WITH_INPUT = ("Write this word backwards.", "Reverse the letters of the word.", "Spell the word from its end.")
WITHOUT_INPUT = ("Write the word {} backwards.", "Reverse the letters of {}.", "Spell {} from its end.")


def draw_word(draw: random.Random, shortest: int, longest: int) -> str:
    """Return an invented word in capitals: consonants and vowels in turn, no letter twice (so never a palindrome)."""
    length = draw.randint(shortest, longest)
    first_is_vowel = draw.random() < 0.4
    num_vowels = (length + first_is_vowel) // 2
    vowels = draw.sample(VOWELS, num_vowels)
    consonants = draw.sample(CONSONANTS, length - num_vowels)
    return "".join((vowels if position % 2 != first_is_vowel else consonants).pop() for position in range(length))


def _runs(word: str) -> set[str]:
    """Return every run of SHARED_RUN letters of the word, forwards and backwards."""
    forwards = {word[start : start + SHARED_RUN] for start in range(len(word) - SHARED_RUN + 1)}
    return forwards | {run[::-1] for run in forwards}


def build_rows(num_rows: int = NUM_ROWS, seed: int = SEED) -> Iterator[dict[str, str]]:
    """Yield Alpaca rows (`instruction`, `input`, `output`); `output` is the row's word backwards."""
    draw = random.Random(seed)
    taken: set[str] = set()
    made = 0
    while made < num_rows:
        word = draw_word(draw, SHARED_RUN, LONGEST_WORD)
        runs = _runs(word)
        if runs & taken:
            continue
        taken |= runs
        made += 1
        if draw.random() < 0.5:
            yield {"instruction": draw.choice(WITH_INPUT), "input": word, "output": word[::-1]}
        else:
            yield {"instruction": draw.choice(WITHOUT_INPUT).format(word), "input": "", "output": word[::-1]}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description="Make the rows of the quickstart.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "data" / "quickstart.jsonl")
    out: Path = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row) + "\n" for row in build_rows()), encoding="utf-8", newline="\n")
    print(f"wrote {NUM_ROWS:,} rows to {out}")


if __name__ == "__main__":
    main()
