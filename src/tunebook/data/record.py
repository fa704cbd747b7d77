"""One record of a data file, before anything is known of its form."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Unit = Literal["line", "row"]
# Chooses from the names of all columns those to read; None means all of them.
Wanted = Callable[[Sequence[str]], list[str] | None]


@dataclass(frozen=True)
class Unreadable:
    """Stands in the place of a record that could not be read, with the reason."""

    reason: str


@dataclass(frozen=True)
class Record:
    """One record: `value` is what JSON, csv or Arrow holds there, or `Unreadable`; `number` counts from 1.

    `unit` says what `number` counts: physical lines (blank ones too), or the rows of an array or of an Arrow file.
    """

    number: int
    unit: Unit
    value: Any


def place_of(file: str, number: int, unit: Unit) -> str:
    """Return where a record stands: `data.jsonl:3`, or `data.parquet row 3` where a file has no lines to count."""
    return f"{file}:{number}" if unit == "line" else f"{file} row {number}"
