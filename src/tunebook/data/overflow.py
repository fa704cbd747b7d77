"""Rows that are longer than the limit: cut, dropped or refused, and what other limits would have done to them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tunebook.errors import Problem, Refused
from tunebook.recipe.schema import DataSection

Policy = Literal["truncate", "drop", "error"]
# Limits that the table can show beside the recipe's own: powers of two up to a million tokens.
_POWERS = tuple(1 << power for power in range(1, 21))
_SHOWN_BELOW = 3
_SHOWN_ROWS = 5


@dataclass(frozen=True)
class Truncation:
    """What one max_length does to all usable rows under the recipe's `on_overflow`; it has the same counts as a run.

    Rows are those that a run trains on: copies and the parts of a split conversation count one by one.

    `num_truncated_rows` are kept with a cut response, `num_dropped_rows` are left out, and `response_tokens_lost` are
    the labels of both that are gone. Under `error` the counts are those that `truncate` would give.
    """

    max_length: int
    num_truncated_rows: int
    num_dropped_rows: int
    response_tokens_lost: int


class Overflow:
    """Decides row by row what the limit leaves of it, and counts what every limit would have left.

    It knows rows by their lengths and the positions of their labels alone, and keeps a fixed number of counts.
    """

    def __init__(self, max_length: int, policy: Policy = "truncate") -> None:
        import numpy as np

        self.max_length = max_length
        self.longest_row = 0
        self.num_longer_rows = 0  # of the source
        self.first_longer_rows: list[tuple[int, int]] = []  # ordinal and tokens
        self._policy = policy
        self._limits = np.array(sorted({*_POWERS, max_length}), np.int64)
        self._num_truncated, self._num_dropped, self._num_lost = np.zeros((3, len(self._limits)), np.int64)

    def kept_lengths(self, lengths: Any, positions: Any, row_of: Any, ordinals: Any) -> Any:
        """Count rows and return how many tokens of each are kept, 0 for a row that is dropped, as an int64 array.

        A row that is cut ends with the last label that is left: in a conversation that may be before the limit.

        `lengths` are the rows' tokens before any cut. `positions` are those of all labels that count, each within its
        row (from 0), and `row_of` says by index whose they are, in the order of the rows. `ordinals` name the rows:
        ascending, equal for the copies and parts of one row of the source, which come in one call.
        """
        import numpy as np

        num_labels = np.bincount(row_of, minlength=len(lengths))
        first_labels = lengths.copy()  # of a row without any label: no limit keeps one
        np.minimum.at(first_labels, row_of, positions)
        self._count(lengths, positions, num_labels, first_labels)
        self.longest_row = max(self.longest_row, int(lengths.max(initial=0)))
        is_longer = lengths > self.max_length
        self._note_longer(lengths[is_longer], np.asarray(ordinals)[is_longer])
        is_left = positions < self.max_length
        label_ends = np.zeros_like(lengths)
        np.maximum.at(label_ends, row_of[is_left], positions[is_left] + 1)
        kept = np.where(is_longer, label_ends, lengths)
        is_dropped = first_labels >= kept
        if self._policy == "drop":
            is_dropped |= is_longer
        return np.where(is_dropped, 0, kept)

    def _note_longer(self, lengths: Any, ordinals: Any) -> None:
        """Count the rows of the source that are longer, copies and parts as one, and remember the first of them."""
        import numpy as np

        distinct, starts = np.unique(ordinals, return_index=True)
        self.num_longer_rows += len(distinct)
        if num_missing := min(len(distinct), _SHOWN_ROWS - len(self.first_longer_rows)):
            longest = np.maximum.reduceat(lengths, starts)
            self.first_longer_rows += zip(distinct[:num_missing].tolist(), longest[:num_missing].tolist(), strict=True)

    def _count(self, lengths: Any, positions: Any, num_labels: Any, first_labels: Any) -> None:
        import numpy as np

        limits = self._limits[:, None]
        is_longer = lengths > limits
        is_dropped = first_labels >= np.minimum(lengths, limits)
        if self._policy == "drop":
            is_dropped |= is_longer
        self._num_truncated += (is_longer & ~is_dropped).sum(axis=1)
        self._num_dropped += is_dropped.sum(axis=1)
        if self._policy == "drop":
            self._num_lost += (is_dropped * num_labels).sum(axis=1)
            return
        # A label at position p is lost to every limit that is at most p.
        num_limits = np.bincount(
            np.searchsorted(self._limits, positions, side="right"), minlength=len(self._limits) + 1
        )
        self._num_lost += num_limits[::-1].cumsum()[::-1][1:]

    def at_limit(self) -> Truncation:
        """Return what the recipe's own limit did."""
        return _at(self.max_length, self._rows())

    def table(self) -> tuple[Truncation, ...]:
        """Return the effect of the recipe's limit, of some powers of two below it and of all up to the longest row."""
        rows = self._rows()
        own = next(index for index, row in enumerate(rows) if row.max_length == self.max_length)
        enough = next((index for index, row in enumerate(rows) if row.max_length >= self.longest_row), len(rows) - 1)
        return tuple(rows[max(0, own - _SHOWN_BELOW) : max(own + 1, enough) + 1])

    def _rows(self) -> list[Truncation]:
        columns = (self._limits, self._num_truncated, self._num_dropped, self._num_lost)
        return [Truncation(*numbers) for numbers in zip(*(column.tolist() for column in columns), strict=True)]


def longer_rows_problems(overflow: Overflow, num_rows: int, places: Sequence[str]) -> list[Problem]:
    """Return the problems of rows that `on_overflow: error` refuses; `places` are those of `first_longer_rows`."""
    shown = [
        Problem(f"{length} tokens", where=place)
        for place, (_, length) in zip(places, overflow.first_longer_rows, strict=True)
    ]
    listed = "they are" if len(shown) == overflow.num_longer_rows else f"the first {len(shown)} are"
    message = f"{overflow.num_longer_rows} of {num_rows} rows are longer than {overflow.max_length} tokens "
    message += f"({listed} listed; the longest row has {overflow.longest_row})"
    fix = "Raise it, shorten the rows, or set data.on_overflow: truncate or drop"
    return [Problem(message, fix, key="data.max_length"), *shown]


def check_truncated_fraction(table: Sequence[Truncation], num_rows: int, data: DataSection) -> None:
    """Raise Refused where the limit cuts or drops more of the usable rows than `data.max_truncated_fraction` allows."""
    here = _at(data.max_length, table)
    num_lost = here.num_truncated_rows + here.num_dropped_rows
    if num_lost <= data.max_truncated_fraction * num_rows:
        return
    message = f"data.max_length {here.max_length} {_render(here, num_rows)}; {data.max_truncated_fraction:g} of the "
    message += f"rows may be{_render_next(here, table)}"
    fix = "Raise data.max_length, shorten the rows, or allow a larger share"
    raise Refused(Problem(message, fix, key="data.max_truncated_fraction"))


def truncation_notes(table: Sequence[Truncation], num_rows: int, max_length: int) -> tuple[str, ...]:
    """Return the warning that rows are cut or dropped, and what the next limit would do; nothing where none is."""
    here = _at(max_length, table)
    if not here.num_truncated_rows and not here.num_dropped_rows:
        return ()
    return (f"data.max_length {here.max_length} {_render(here, num_rows)}{_render_next(here, table)}",)


def _at(max_length: int, table: Sequence[Truncation]) -> Truncation:
    return next(row for row in table if row.max_length == max_length)


def _render(row: Truncation, num_rows: int) -> str:
    num_lost = row.num_truncated_rows + row.num_dropped_rows
    share = f"({num_lost / num_rows:.1%})"
    counts = f"cuts {row.num_truncated_rows:,} and drops {row.num_dropped_rows:,} of {num_rows:,} rows {share}"
    return f"{counts}: {row.response_tokens_lost:,} response tokens lost"


def _render_next(here: Truncation, table: Sequence[Truncation]) -> str:
    above = [row for row in table if row.max_length > here.max_length]
    if not above:
        return ""
    num_lost = above[0].num_truncated_rows + above[0].num_dropped_rows
    return f"; {above[0].max_length} would cut or drop {num_lost:,}"


def table_as_json(table: Sequence[Truncation]) -> list[dict[str, int]]:
    """Return the table as JSON, from which `Truncation(**row)` makes each row again."""
    return [asdict(row) for row in table]
