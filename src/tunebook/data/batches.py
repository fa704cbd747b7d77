"""Rows in lists that are small against the machine's memory, whatever their length."""

from collections.abc import Iterator

from tunebook.data.rows import UsedRow

# A batch is small against the machine's memory even if its rows are long (an encoding takes about 150 bytes a token).
_BATCH_ROWS = 1000
_BATCH_CHARS = 1_000_000


def batches_of(rows: Iterator[UsedRow]) -> Iterator[list[UsedRow]]:
    """Yield lists of rows, bounded in rows and in characters; a single row may be longer than the bound.

    A conversation is rendered once for each of its answers, so its characters count as often, and so do those of
    copies, whose labels are all made at once.
    """
    batch: list[UsedRow] = []
    num_chars = 0
    for used in rows:
        row = used.placed.row
        row_chars = row.num_chars * max(used.copies, len(row.messages) // 2)
        if batch and (len(batch) == _BATCH_ROWS or num_chars + row_chars > _BATCH_CHARS):
            yield batch
            batch, num_chars = [], 0
        batch.append(used)
        num_chars += row_chars
    if batch:
        yield batch
