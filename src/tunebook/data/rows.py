"""The rows behind `data.path`: opened, read one by one, and all checked before anything is made of them."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TextIO

from tunebook.data.formats import (
    ALPACA_OPTIONAL,
    ALPACA_REQUIRED,
    AlpacaRow,
    Fault,
    find_wrong_columns,
    parse_alpaca,
)
from tunebook.data.records import Record, Unit, Unreadable, read_records
from tunebook.errors import Problem, Refused
from tunebook.places import check_data_path, is_local_data, list_data_files
from tunebook.recipe.schema import DataSection

# A column that none of so many rows has is missing from the file, not from a row.
_ROWS_THAT_SHOW_COLUMNS = 100
_SHOWN_BAD_ROWS = 5


class Source(Protocol):
    """Rows in a fixed order, in one or more parts (files, or one split of a Hub data set)."""

    @property
    def names(self) -> tuple[str, ...]:
        """The parts as the user knows them."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about the place, one line each."""

    def records(self, part: int) -> Iterator[Record]:
        """Yield the records of one part in order; the same ones each time."""

    def content_digest(self) -> str:
        """Return the sha256 of the content of all parts in order, without their names."""


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
        """The place: `data.jsonl:3`, or `data.parquet row 3` where a file has no lines to count."""
        return f"{self.file}:{self.number}" if self.unit == "line" else f"{self.file} row {self.number}"


@dataclass(frozen=True)
class FileSource:
    """Local data files in the order they are read."""

    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The files' paths as the recipe has them."""
        return tuple(str(file) for file in self.files)

    def records(self, part: int) -> Iterator[Record]:
        """Yield the records of one file."""
        return read_records(self.files[part], ALPACA_REQUIRED, ALPACA_OPTIONAL)

    def content_digest(self) -> str:
        """Return the sha256 of the files' own sha256 in order; the suffix counts, since it says how a file is read."""
        digest = hashlib.sha256()
        for file in self.files:
            with file.open("rb") as content:
                digest.update(file.suffix.lower().encode() + hashlib.file_digest(content, "sha256").digest())
        return digest.hexdigest()


@dataclass(frozen=True)
class Scan:
    """What one reading of all rows found."""

    num_rows: int
    num_bad_rows: int


def open_source(data: DataSection) -> Source:
    """Return the rows that `data.path` names. Raises `Refused` with every problem of the path."""
    problems = check_data_path(data.path)
    if problems:
        raise Refused(problems)
    if is_local_data(data.path):
        listing = list_data_files(data.path)
        return FileSource(listing.files, listing.notes)
    from tunebook.data.hub import load_hub_source

    return load_hub_source(data.path, data.revision, data.split)


def read_rows(source: Source, part: int) -> Iterator[AlpacaRow | BadRow]:
    """Yield one part's rows in order, a `BadRow` in the place of each that is unusable."""
    for record in source.records(part):
        yield _row_of(record, source.names[part])


def read_good_rows(source: Source) -> Iterator[AlpacaRow]:
    """Yield the usable rows of all parts in order; their position in this stream is the row's ordinal elsewhere."""
    for part in range(len(source.names)):
        for row in read_rows(source, part):
            if not isinstance(row, BadRow):
                yield row


def find_places(source: Source, ordinals: Sequence[int]) -> list[str]:
    """Return where the usable rows of these ordinals stand, as `file:line` or `file row n`; ordinals ascend."""
    places: list[str] = []
    ordinal = 0
    for part, name in enumerate(source.names):
        for record in source.records(part):
            if len(places) == len(ordinals):
                return places
            if isinstance(_row_of(record, name), BadRow):
                continue
            if ordinal == ordinals[len(places)]:
                places.append(BadRow(name, record.number, record.unit, "", "").where)
            ordinal += 1
    return places


def _row_of(record: Record, file: str) -> AlpacaRow | BadRow:
    row = Fault("", record.value.reason) if isinstance(record.value, Unreadable) else parse_alpaca(record.value)
    return BadRow(file, record.number, record.unit, *row) if isinstance(row, Fault) else row


def scan_usable(source: Source, quarantine: Path, max_bad_fraction: float) -> Scan:
    """Read all rows once, write the bad ones to the file `quarantine`, and refuse what can't be trained on."""
    with quarantine.open("w", encoding="utf-8") as file:
        scan = scan_rows(source, file)
    check_bad_fraction(scan, read_quarantine(quarantine, source.names), max_bad_fraction)
    if scan.num_rows == scan.num_bad_rows:
        message = f"none of the {scan.num_rows} rows in {', '.join(source.names)} can be used"
        raise Refused(Problem(message, "Mend the rows", key="data.path"))
    return scan


def scan_rows(source: Source, quarantine: TextIO) -> Scan:
    """Read every row once, write each bad one to `quarantine` (a JSON object per line) and return the counts.

    Raises `Refused` with a problem for each part that has other columns, is damaged or has no rows at all.
    """
    num_rows, num_bad_rows = 0, 0
    problems: list[Problem] = []
    for part in range(len(source.names)):
        try:
            scan = _scan_part(source, part, quarantine)
        except Refused as refused:
            problems.extend(refused.problems)
        else:
            num_rows += scan.num_rows
            num_bad_rows += scan.num_bad_rows
    if problems:
        raise Refused(problems)
    return Scan(num_rows, num_bad_rows)


def _scan_part(source: Source, part: int, quarantine: TextIO) -> Scan:
    name = source.names[part]
    columns = _SeenColumns(name)
    num_rows, num_bad_rows = 0, 0
    for record in source.records(part):
        columns.add(record.value)
        num_rows += 1
        row = _row_of(record, name)
        if isinstance(row, BadRow):
            num_bad_rows += 1
            entry = [part, row.number, row.unit, row.field, row.reason]
            quarantine.write(json.dumps(entry) + "\n")
    columns.check()
    if num_rows == 0:
        raise Refused(Problem(f"no rows in {name}", "Give a file with rows", key="data.path"))
    return Scan(num_rows, num_bad_rows)


class _SeenColumns:
    """The columns of a part's first objects, to tell a file with other columns from one with bad rows."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.num_objects = 0
        self.columns: dict[str, None] = {}  # in the order they were seen

    def add(self, value: Any) -> None:
        if self.num_objects < _ROWS_THAT_SHOW_COLUMNS and isinstance(value, dict):
            self.num_objects += 1
            self.columns |= dict.fromkeys(value)
            if self.num_objects == _ROWS_THAT_SHOW_COLUMNS:
                self.check()

    def check(self) -> None:
        problem = find_wrong_columns(self.columns, self.file) if self.num_objects else None
        if problem:
            raise Refused(problem)


def read_quarantine(path: Path, names: tuple[str, ...]) -> Iterator[BadRow]:
    """Yield the bad rows that `scan_rows` wrote to `path`, with the parts' present `names`."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            part, *rest = json.loads(line)
            yield BadRow(names[part], *rest)


def check_bad_fraction(scan: Scan, bad_rows: Iterator[BadRow], max_bad_fraction: float) -> None:
    """Raise `Refused` where more rows are bad than the recipe allows, naming the first of them and their number."""
    if scan.num_bad_rows <= max_bad_fraction * scan.num_rows:
        return
    shown = list(islice(bad_rows, _SHOWN_BAD_ROWS))
    listed = "they are listed" if len(shown) == scan.num_bad_rows else f"the first {len(shown)} are listed"
    share = f"{scan.num_bad_rows} of {scan.num_rows} rows can't be used ({listed}), {max_bad_fraction:g} of them may"
    fix = "Mend the rows, or allow a larger share to be left out"
    summary = Problem(share, fix, key="data.max_bad_fraction")
    raise Refused([summary, *(Problem(row.reason, where=row.where) for row in shown)])
