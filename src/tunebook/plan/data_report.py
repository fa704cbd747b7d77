"""What the prepared rows are: how many from where, how long, and how much of them is trained.

Everything is told from the prepared columns in one pass over the memory-mapped files, batch by batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from tunebook.data.labels import IGNORED
from tunebook.data.overflow import Truncation
from tunebook.data.prepare import PreparedData

# A hash of each row is kept to find equal ones: 100 MB for so many rows. Above it equal rows are not counted.
LARGEST_COMPARED = 2_000_000


@dataclass(frozen=True)
class DataReport:
    """The data of a run in numbers. Lengths are in tokens after the cut, `longest_row` is before it.

    Rows with those that are repeated and split are the training, held-out, dropped, bad, duplicate and unused rows
    together. `num_equal_rows` are rows with the same tokens as an earlier one, the copies that weights make not counted
    (None: too many rows to compare; where rows are dropped, it may be too few). `rows_with_stop` counts the rows that
    train the token which ends a turn.
    """

    rows_by_source: tuple[tuple[str, int], ...]
    forms: tuple[str, ...]
    template: str
    num_rows: int
    num_repeated_rows: int
    num_split_rows: int
    num_train_rows: int
    num_eval_rows: int
    num_bad_rows: int
    num_dropped_rows: int
    num_duplicate_rows: int
    num_unused_rows: int
    num_truncated_rows: int
    length_p50: int
    length_p95: int
    length_max: int
    longest_row: int
    trained_tokens: int
    all_tokens: int
    rows_with_stop: int
    num_equal_rows: int | None
    limits: tuple[Truncation, ...]

    @property
    def trained_share(self) -> float:
        """Labels that count, as a share of all tokens of the training rows."""
        return self.trained_tokens / self.all_tokens if self.all_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for --json."""
        return {**asdict(self), "trained_share": self.trained_share}


def report_data(data: PreparedData) -> DataReport:
    """Return the report of prepared data; it reads every row once."""
    import numpy as np

    counts = _Counts(data.stop_token_id, data.num_train_rows + data.num_eval_rows <= LARGEST_COMPARED)
    for batch in _batches([data.train, data.evaluation]):
        counts.add(batch)
    lengths = np.asarray(data.train.data.column("length").to_numpy())
    equal = counts.num_equal_rows
    p50, p95 = (int(np.percentile(lengths, share, method="higher")) for share in (50, 95))
    return DataReport(
        rows_by_source=tuple(zip(data.source_names, data.rows_by_part, strict=True)),
        forms=data.forms,
        template=data.template,
        num_rows=data.num_rows,
        num_repeated_rows=data.num_repeated_rows,
        num_split_rows=data.num_split_rows,
        num_train_rows=data.num_train_rows,
        num_eval_rows=data.num_eval_rows,
        num_bad_rows=data.num_bad_rows,
        num_dropped_rows=data.num_dropped_rows,
        num_duplicate_rows=data.num_duplicate_rows,
        num_unused_rows=data.num_unused_rows,
        num_truncated_rows=data.num_truncated_rows,
        length_p50=p50,
        length_p95=p95,
        length_max=int(lengths.max()),
        longest_row=data.longest_row,
        trained_tokens=data.trained_tokens,
        all_tokens=int(lengths.sum()),
        rows_with_stop=counts.rows_with_stop,
        num_equal_rows=None if equal is None else max(0, equal - data.num_repeated_rows),
        limits=data.truncation_table,
    )


class _Counts:
    """Rows that train the stop token, and rows that are like an earlier one."""

    def __init__(self, stop_token_id: int, compares: bool) -> None:
        self._stop_token_id = stop_token_id
        self._seen: set[int] | None = set() if compares else None
        self._num_rows = 0
        self.rows_with_stop = 0

    @property
    def num_equal_rows(self) -> int | None:
        """Rows with the tokens of an earlier row, or None where they were not compared."""
        return None if self._seen is None else self._num_rows - len(self._seen)

    def add(self, batch: Any) -> None:
        """Count the rows of one record batch."""
        import numpy as np

        labels, offsets = _flat(batch.column("labels"))
        starts, ends = offsets[:-1], offsets[1:]
        trained = np.flatnonzero(labels != IGNORED)
        row_of = np.searchsorted(ends, trained, side="right")
        self.rows_with_stop += len(np.unique(row_of[labels[trained] == self._stop_token_id]))
        self._num_rows += len(starts)
        if self._seen is not None:
            ids, offsets = _flat(batch.column("input_ids"))
            data, places = ids.tobytes(), (offsets * ids.itemsize).tolist()
            self._seen.update(hash(data[start:end]) for start, end in pairwise(places))


def _flat(column: Any) -> tuple[Any, Any]:
    """Return the values of a list column in one array, and where each row's begin and end in it."""
    import numpy as np

    offsets = np.asarray(column.offsets.to_numpy(), np.int64)
    return column.values.to_numpy()[offsets[0] : offsets[-1]], offsets - offsets[0]


def _batches(splits: Sequence[Any]) -> Iterator[Any]:
    for split in splits:
        if split is not None:
            yield from (batch for batch in split.data.table.to_batches() if batch.num_rows)
