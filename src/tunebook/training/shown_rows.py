"""rows.json: what a run's rows look like, for people: how long they are, and some answers before and after."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from tunebook.data.prepare import HeldOutExample, PreparedData
from tunebook.system.writing import write_whole

ROWS = "rows.json"
MAX_BARS = 40
MAX_SAMPLES = 8


def write_rows(folder: Path, data: PreparedData, before: Sequence[str] = (), after: Sequence[str] = ()) -> None:
    """Write rows.json, whole or not at all, with the answers that are there so far."""
    lengths = numpy.asarray(data.train["length"], dtype=numpy.int64)
    rows = {
        "lengths": count_lengths(lengths),
        "tokens": int(lengths.sum()),
        "trained_tokens": data.trained_tokens,
        "samples": _samples(data.examples, before, after),
    }
    write_whole(folder / ROWS, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def count_lengths(lengths: Any) -> dict[str, Any]:
    """Return a histogram of lengths in tokens: the `counts` of bars `width` tokens wide, the first from `start` on."""
    if not len(lengths):
        return {"start": 0, "width": 1, "counts": [], "shortest": 0, "longest": 0}
    shortest, longest = int(lengths.min()), int(lengths.max())
    width = next_round(-(-(longest - shortest + 1) // MAX_BARS))
    start = shortest // width * width
    counts = numpy.bincount((lengths - start) // width)
    return {"start": start, "width": width, "counts": counts.tolist(), "shortest": shortest, "longest": longest}


def next_round(number: int) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50, ... that is not below `number`."""
    size = 1
    while True:
        for digit in (1, 2, 5):
            if digit * size >= number:
                return digit * size
        size *= 10


def _samples(
    examples: Sequence[HeldOutExample], before: Sequence[str], after: Sequence[str]
) -> list[dict[str, str | None]]:
    return [
        {
            "prompt": example.prompt,
            "answer": example.answer,
            "before": before[place] if place < len(before) else None,
            "after": after[place] if place < len(after) else None,
        }
        for place, example in enumerate(examples[:MAX_SAMPLES])
    ]
