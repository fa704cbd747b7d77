"""What the prepared rows are: how many from where, how long, how much of them is trained, and what a limit would cut.

Everything is told from the prepared columns in one pass over the memory-mapped files, batch by batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from tunebook.data.labels import IGNORED
from tunebook.data.prepare import PreparedData
from tunebook.data.rows import open_source
from tunebook.recipe.schema import Recipe

LIMITS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
# A hash of each row is kept to find equal ones: 100 MB for so many rows. Above it equal rows are not counted.
LARGEST_COMPARED = 2_000_000


@dataclass(frozen=True)
class LimitRow:
    """What one max_length does: rows kept with a cut response, rows left without any, response tokens lost in all."""

    max_length: int
    num_truncated_rows: int
    num_dropped_rows: int
    response_tokens_lost: int


@dataclass(frozen=True)
class DataReport:
    """The data of a run in numbers. Lengths are in tokens after the cut, `longest_row` is before it.

    `num_equal_rows` are rows with the same tokens as an earlier one (None: too many rows to compare);
    `rows_with_stop` counts the rows that train the token which ends a turn.
    """

    rows_by_source: tuple[tuple[str, int], ...]
    template: str
    num_rows: int
    num_train_rows: int
    num_eval_rows: int
    num_bad_rows: int
    num_dropped_rows: int
    num_truncated_rows: int
    length_p50: int
    length_p95: int
    length_max: int
    longest_row: int
    trained_tokens: int
    all_tokens: int
    rows_with_stop: int
    num_equal_rows: int | None
    limits: tuple[LimitRow, ...]

    @property
    def trained_share(self) -> float:
        """Labels that count, as a share of all tokens of the training rows."""
        return self.trained_tokens / self.all_tokens if self.all_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for --json."""
        return {**asdict(self), "trained_share": self.trained_share}


def report_data(recipe: Recipe, data: PreparedData) -> DataReport:
    """Return the report of prepared data; it reads every row once."""
    import numpy as np

    counts = _Counts(data.stop_token_id, data.num_train_rows + data.num_eval_rows <= LARGEST_COMPARED)
    for batch in _batches([data.train, data.evaluation]):
        counts.add(batch)
    lengths = np.asarray(data.train.data.column("length").to_numpy())
    p50, p95 = (int(np.percentile(lengths, share, method="higher")) for share in (50, 95))
    return DataReport(
        rows_by_source=count_rows_by_source(recipe, data),
        template=data.template,
        num_rows=data.num_rows,
        num_train_rows=data.num_train_rows,
        num_eval_rows=data.num_eval_rows,
        num_bad_rows=data.num_bad_rows,
        num_dropped_rows=data.num_dropped_rows,
        num_truncated_rows=data.num_truncated_rows,
        length_p50=p50,
        length_p95=p95,
        length_max=int(lengths.max()),
        longest_row=data.longest_row,
        trained_tokens=data.trained_tokens,
        all_tokens=int(lengths.sum()),
        rows_with_stop=counts.rows_with_stop,
        num_equal_rows=counts.num_equal_rows,
        limits=limits_of(data, counts, recipe.data.max_length),
    )


def count_rows_by_source(recipe: Recipe, data: PreparedData) -> tuple[tuple[str, int], ...]:
    """Return the rows of each file or data set, bad ones included; several are read again, without tokenising."""
    if len(data.source_names) == 1:
        return ((data.source_names[0], data.num_rows),)
    source = open_source(recipe.data)
    return tuple((name, sum(1 for _ in source.records(part))) for part, name in enumerate(source.names))


def limits_of(data: PreparedData, counts: "_Counts", max_length: int) -> tuple[LimitRow, ...]:
    """Return what the recipe's limit and others do to all usable rows.

    Below the recipe's own limit it follows from the prepared rows; at the longest row and above nothing is cut. Between
    the two it can't be told from rows that are cut already.
    """
    known = [*[limit for limit in LIMITS if limit < max_length][-3:], max_length]
    enough = [limit for limit in LIMITS if limit >= data.longest_row and limit > max_length][:1]
    rows = [
        LimitRow(
            limit,
            int(counts.longer_than(limit) - counts.without_label_below(limit))
            if limit < max_length
            else data.num_truncated_rows,
            data.num_dropped_rows + int(counts.without_label_below(limit) if limit < max_length else 0),
            data.response_tokens_lost + int(counts.labels_from(limit) if limit < max_length else 0),
        )
        for limit in known
    ]
    return (*rows, *(LimitRow(limit, 0, 0, 0) for limit in enough))


class _Counts:
    """Histograms over rows: their lengths, the places of their labels, the place of the first label."""

    def __init__(self, stop_token_id: int, compares: bool) -> None:
        import numpy as np

        self._stop_token_id = stop_token_id
        self._seen: set[int] | None = set() if compares else None
        self._lengths, self._labels, self._firsts = (np.zeros(1, np.int64) for _ in range(3))
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
        first = trained[np.minimum(np.searchsorted(trained, starts), len(trained) - 1)] - starts
        self._lengths = _added(self._lengths, ends - starts)
        self._labels = _added(self._labels, trained - starts[row_of])
        self._firsts = _added(self._firsts, first)
        self.rows_with_stop += len(np.unique(row_of[labels[trained] == self._stop_token_id]))
        self._num_rows += len(starts)
        if self._seen is not None:
            ids, offsets = _flat(batch.column("input_ids"))
            data, places = ids.tobytes(), (offsets * ids.itemsize).tolist()
            self._seen.update(hash(data[start:end]) for start, end in pairwise(places))

    def longer_than(self, limit: int) -> int:
        """Return how many rows have more than `limit` tokens."""
        return int(self._lengths[limit + 1 :].sum())

    def without_label_below(self, limit: int) -> int:
        """Return how many rows have their first label at `limit` or after it."""
        return int(self._firsts[limit:].sum())

    def labels_from(self, limit: int) -> int:
        """Return how many labels are at `limit` or after it."""
        return int(self._labels[limit:].sum())


def _added(histogram: Any, values: Any) -> Any:
    import numpy as np

    counts = np.bincount(values, minlength=len(histogram))
    counts[: len(histogram)] += histogram
    return counts


def _flat(column: Any) -> tuple[Any, Any]:
    """Return the values of a list column in one array, and where each row's begin and end in it."""
    import numpy as np

    offsets = np.asarray(column.offsets.to_numpy(), np.int64)
    return column.values.to_numpy()[offsets[0] : offsets[-1]], offsets - offsets[0]


def _batches(splits: Sequence[Any]) -> Iterator[Any]:
    for split in splits:
        if split is not None:
            yield from (batch for batch in split.data.table.to_batches() if batch.num_rows)
