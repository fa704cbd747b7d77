"""Rows that are kept out: where they stand and why, written down one by one, and refused where they are too many."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO

from tunebook.data.conversation import Fault
from tunebook.data.record import Unit, place_of
from tunebook.errors import Problem, Refused

_SHOWN_BAD_ROWS = 5


@dataclass(frozen=True)
class BadRow:
    """A row that is kept out, where it stands (`number` counts lines or rows from 1) and why."""

    file: str
    number: int
    unit: Unit
    field: str
    reason: str

    @property
    def where(self) -> str:
        """The place: `data.jsonl:3`, or `data.parquet row 3`."""
        return place_of(self.file, self.number, self.unit)


def write_bad_row(quarantine: TextIO, part: int, number: int, unit: Unit, fault: Fault) -> None:
    """Add a bad row of a source's part to the file, as a line of JSON."""
    quarantine.write(json.dumps([part, number, unit, *fault]) + "\n")


def read_quarantine(path: Path, names: tuple[str, ...]) -> Iterator[BadRow]:
    """Yield the bad rows that were written to `path`, with the parts' present `names`."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            part, *rest = json.loads(line)
            yield BadRow(names[part], *rest)


def check_bad_fraction(num_rows: int, num_bad_rows: int, bad_rows: Iterator[BadRow], max_bad_fraction: float) -> None:
    """Raise `Refused` where more rows are bad than the recipe allows, naming the first of them and their number."""
    if num_bad_rows <= max_bad_fraction * num_rows:
        return
    shown = first_problems(bad_rows)
    listed = "they are listed" if len(shown) == num_bad_rows else f"the first {len(shown)} are listed"
    share = f"{num_bad_rows} of {num_rows} rows can't be used ({listed}), {max_bad_fraction:g} of them may"
    fix = "Mend the rows, or allow a larger share to be left out"
    summary = Problem(share, fix, key="data.max_bad_fraction")
    raise Refused([summary, *shown])


def first_problems(bad_rows: Iterator[BadRow]) -> list[Problem]:
    """Return what is wrong with the first bad rows."""
    return [Problem(row.reason, where=row.where) for row in islice(bad_rows, _SHOWN_BAD_ROWS)]
