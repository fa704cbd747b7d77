"""The rows of a source, read one by one: all checked before anything is made of them, then those that are trained."""

import hashlib
import json
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from tunebook.data.columns import ambiguous_form, wrong_columns
from tunebook.data.conversation import Conversation, Fault
from tunebook.data.drawing import Draw
from tunebook.data.formats import Form, find_forms, parse_row, possible_forms
from tunebook.data.garbage import garbage_search_paused
from tunebook.data.quarantine import check_bad_fraction, first_problems, read_quarantine, write_bad_row
from tunebook.data.record import Record, Unit, Unreadable
from tunebook.data.sources import Source, no_rows, source_title
from tunebook.errors import Problem, Refused
from tunebook.recipe.schema import DataSection, DataSource

# A column that none of so many rows has is missing from the file, not from a row.
_ROWS_THAT_SHOW_COLUMNS = 100


class PlacedRow(NamedTuple):
    """A usable row and where it stands; `number` counts lines or rows of the part from 1."""

    row: Conversation
    part: int
    number: int
    unit: Unit


class UsedRow(NamedTuple):
    """A row that is trained: its place among those, from 0, and how often it counts."""

    ordinal: int
    copies: int
    placed: PlacedRow


@dataclass(frozen=True)
class Scan:
    """What one reading of all rows found.

    `rows_by_part` holds all rows of each file or data set, bad ones included; they are `num_rows` in all.
    `num_distinct` holds for each source, by its key in the recipe, the usable rows that are not left out as duplicates;
    `forms` the forms that were found.
    """

    num_rows: int
    num_bad_rows: int
    rows_by_part: tuple[int, ...] = ()
    num_duplicate_rows: int = 0
    num_distinct: tuple[tuple[str, int], ...] = ()
    forms: tuple[str, ...] = ()
    num_used_rows: int = 0  # distinct rows that are drawn from the sources
    num_repeated_rows: int = 0  # copies beyond the first, by weights above 1

    @property
    def num_unused_rows(self) -> int:
        """Usable rows that their source's weight or number leaves out."""
        return self.num_rows - self.num_bad_rows - self.num_duplicate_rows - self.num_used_rows


def scan_usable(source: Source, quarantine: Path, data: DataSection) -> Scan:
    """Read all rows once, write the bad ones to the file `quarantine`, and refuse what can't be trained on."""
    with quarantine.open("w", encoding="utf-8") as file, garbage_search_paused():
        scan = scan_rows(source, file, data.deduplicate)
    bad_rows = read_quarantine(quarantine, source.names)
    check_bad_fraction(scan.num_rows, scan.num_bad_rows, bad_rows, data.max_bad_fraction)
    if scan.num_rows == scan.num_bad_rows:
        message = f"none of the {scan.num_rows} rows in {', '.join(source.names)} can be used"
        bad_rows = read_quarantine(quarantine, source.names)
        raise Refused([Problem(message, "Mend the rows", key="data.path"), *first_problems(bad_rows)])
    shares = [_Share(section, num_rows) for section, num_rows in _by_section(source, scan)]
    used, copies = sum(share.num_used for share in shares), sum(share.num_copies for share in shares)
    if used == 0:
        message = f"the weights leave none of the {scan.num_rows} rows"
        raise Refused(Problem(message, "Raise them", key="data.sources"))
    return replace(scan, num_used_rows=used, num_repeated_rows=copies - used)


def scan_rows(source: Source, quarantine: TextIO, deduplicate: bool = False) -> Scan:
    """Read every row once, write each bad one to `quarantine` (a JSON object per line) and return the counts.

    Raises `Refused` with a problem for each part that has other columns, is damaged or has no rows at all.
    """
    num_rows = num_bad_rows = num_duplicate_rows = 0
    seen = _Seen(deduplicate)
    distinct = {section.key: 0 for section in source.sections}
    forms: dict[str, None] = {}
    problems: list[Problem] = []
    rows_by_part: list[int] = []
    for part in range(len(source.names)):
        before = num_rows
        try:
            form, records = open_part(source, part)
            for record in records:
                num_rows += 1
                row = _row_of(record, form)
                if isinstance(row, Fault):
                    num_bad_rows += 1
                    write_bad_row(quarantine, part, record.number, record.unit, row)
                elif seen.again(row):
                    num_duplicate_rows += 1
                else:
                    distinct[source.sections[part].key] += 1
            if num_rows == before:
                raise no_rows(source.names[part], source.sections[part].key)
            forms |= {form.title: None}
            rows_by_part.append(num_rows - before)
        except Refused as refused:
            problems.extend(refused.problems)
    if problems:
        raise Refused(problems)
    counts = (num_rows, num_bad_rows, tuple(rows_by_part), num_duplicate_rows)
    return Scan(*counts, tuple(distinct.items()), tuple(forms))


def open_part(source: Source, part: int) -> tuple[Form, Iterator[Record]]:
    """Return the form of a part's rows, told by its first objects, and all of its records."""
    records = source.records(part)
    section, name = source.sections[part], source.names[part]
    first: list[Record] = []
    shown: list[Mapping[str, Any]] = []
    for record in records:
        first.append(record)
        if isinstance(record.value, Mapping):
            shown.append(record.value)
        if len(shown) == _ROWS_THAT_SHOW_COLUMNS:
            break
    if not shown:  # every row is bad, whatever its form
        return possible_forms(section)[0], chain(first, records)
    forms = find_forms(section, shown)
    if len(forms) != 1 and isinstance(records, Generator):
        records.close()  # the error would keep the file open
    if not forms:
        raise Refused(wrong_columns(dict.fromkeys(column for row in shown for column in row), name, section))
    if len(forms) > 1:
        raise Refused(ambiguous_form(forms, name, section))
    return forms[0], chain(first, records)


def read_good_rows(source: Source) -> Iterator[PlacedRow]:
    """Yield the usable rows of all parts in order."""
    for part in range(len(source.names)):
        form, records = open_part(source, part)
        for record in records:
            row = _row_of(record, form)
            if not isinstance(row, Fault):
                yield PlacedRow(row, part, record.number, record.unit)


def read_used_rows(source: Source, scan: Scan, seed: int, deduplicate: bool = False) -> Iterator[UsedRow]:
    """Yield the rows that are trained, in order: what the sources' weights and numbers leave of the distinct ones."""
    seen = _Seen(deduplicate)
    shares = {section.key: _Share(section, num_rows, seed) for section, num_rows in _by_section(source, scan)}
    keys = [section.key for section in source.sections]
    ordinal = 0
    for placed in read_good_rows(source):
        if seen.again(placed.row):
            continue
        copies = shares[keys[placed.part]].take()
        if copies:
            yield UsedRow(ordinal, copies, placed)
            ordinal += 1


def _row_of(record: Record, form: Form) -> Conversation | Fault:
    if isinstance(record.value, Unreadable):
        return Fault("", record.value.reason)
    return parse_row(record.value, form)


def _by_section(source: Source, scan: Scan) -> list[tuple[DataSource, int]]:
    sections = {section.key: section for section in source.sections}
    return [(sections[key], num_rows) for key, num_rows in scan.num_distinct]


class _Share:
    """How often each row of a source is taken: each `weight` times, a fraction of a time meaning some rows once more.

    Raises `Refused` where more rows are asked for than there are.
    """

    def __init__(self, section: DataSource, num_rows: int, seed: int = 0) -> None:
        if section.rows is not None and section.rows > num_rows:
            message = f"{section.rows} rows are asked of {source_title([section], section.key)}, which has {num_rows}"
            raise Refused(Problem(message, f"Set it to {num_rows} at most, or set weight", key=f"{section.key}.rows"))
        self._whole = 0 if section.rows is not None else int(section.weight)
        extra = section.rows if section.rows is not None else round((section.weight - self._whole) * num_rows)
        self.num_copies = self._whole * num_rows + extra
        self.num_used = num_rows if self._whole else extra
        self._draw = Draw(num_rows, extra, f"{seed} {section.key}")
        self._next = 0

    def take(self) -> int:
        """Return how often the next row counts."""
        copies = self._whole + self._draw.draw(self._next)
        self._next += 1
        return copies


class _Seen:
    """Remembers rows by their hash, about 100 bytes each; nothing where duplicates are kept."""

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self._digests: set[bytes] = set()

    def again(self, row: Conversation) -> bool:
        """Return whether this very row came before."""
        if not self._is_on:
            return False
        text = json.dumps(row, sort_keys=True, default=str)
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        known = digest in self._digests
        self._digests.add(digest)
        return known
