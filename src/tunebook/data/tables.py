"""What the readers of files share with compressed ones, and the records of csv, parquet and arrow files."""

import csv
import gzip
import io
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from tunebook.data.record import Record, Unreadable, Wanted
from tunebook.errors import Problem, Refused

_BATCH_ROWS = 1000
_BUFFER_BYTES = 1 << 18


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, decompressed where its name ends in .gz or .zst.

    Raises `Refused` where the compressed content turns out to be damaged, while it is being read.
    """
    suffix = path.suffix.lower()
    if suffix not in (".gz", ".zst"):
        with path.open("rb") as file:
            yield file
        return
    try:
        with gzip.open(path, "rb") if suffix == ".gz" else _open_zstd(path) as file:
            yield io.BufferedReader(file, _BUFFER_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Refused(Problem(f"can't be decompressed: {reason}", "Write it again", where=str(path))) from error


class _Zstd(io.RawIOBase):
    """A decompressing Arrow stream as Python's readers want it; Python 3.11 itself can't read zstd."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self._file = pa.OSFile(str(path), "rb")
        self._stream = pa.CompressedInputStream(self._file, "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._stream.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            self._file.close()
        super().close()


def _open_zstd(path: Path) -> _Zstd:
    return _Zstd(path)


def read_csv_records(path: Path, file: BinaryIO) -> Iterator[Record]:
    """Yield the rows of a csv file with commas and a header line, each with the line that it begins on.

    Every value is text. Raises `Refused` where the header names a column twice or the quotes never close.
    """
    csv.field_size_limit(sys.maxsize)  # Python's limit is 128 KiB a field
    header: list[str] | None = None
    with io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        for line, fields in _csv_lines(path, csv.reader(text, strict=True)):
            if isinstance(fields, Unreadable):
                yield Record(line, "line", fields)
            elif header is None:
                header = [name.strip() for name in fields]
                if twice := [name for name in header if header.count(name) > 1]:
                    raise Refused(Problem(f"two columns are called {twice[0]!r}", "Rename one", f"{path}:{line}"))
            elif len(fields) != len(header):
                reason = f"{len(fields)} fields, and the header has {len(header)}"
                yield Record(line, "line", Unreadable(reason))
            else:
                yield Record(line, "line", dict(zip(header, fields, strict=True)))


def _csv_lines(path: Path, reader: Any) -> Iterator[tuple[int, list[str] | Unreadable]]:
    """Yield the fields of each line that has any, with the number of the line that they begin on."""
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                message = "a quote that opens here never closes"
                raise Refused(
                    Problem(message, "Close it, or double quotes inside a field", f"{path}:{line}")
                ) from error
            yield line, Unreadable(f"not csv: {error}")
            continue
        if fields is None:
            return
        if fields:
            yield line, fields


def read_arrow_records(path: Path, wanted: Wanted) -> Iterator[Record]:
    """Yield the rows of a parquet or arrow file; of the columns those that `wanted` chooses.

    An arrow file may be a stream, as `datasets` saves them, or have the file format. Raises `Refused` where it is
    damaged.
    """
    import pyarrow as pa

    batches = _parquet_batches if path.suffix.lower() == ".parquet" else _ipc_batches
    try:
        yield from records_of_batches(batches(path, wanted))
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        kind = path.suffix.lower().removeprefix(".")
        raise Refused(Problem(f"not a readable {kind} file: {reason}", "Write it again", where=str(path))) from error


def _parquet_batches(path: Path, wanted: Wanted) -> Iterator[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=_BATCH_ROWS, columns=wanted(file.schema_arrow.names))


def _ipc_batches(path: Path, wanted: Wanted) -> Iterator[Any]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        if file.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(file)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            file.seek(0)
            batches = reader = pa.ipc.open_stream(file)
        columns = wanted(reader.schema.names)
        for batch in batches:
            chosen = batch.select(columns) if columns else batch
            for start in range(0, chosen.num_rows, _BATCH_ROWS):
                yield chosen.slice(start, _BATCH_ROWS)


def records_of_batches(batches: Iterable[Any]) -> Iterator[Record]:
    """Yield the rows of Arrow record batches or tables as `Record`s numbered from 1.

    Keys that are null inside a nested value are left out: Arrow gives every object of a column the keys of all others.
    """
    number = 0
    for batch in batches:
        try:
            values = batch.to_pylist()
        except UnicodeDecodeError:
            values = [_row_value(batch, row) for row in range(batch.num_rows)]
        for value in values:
            number += 1
            yield Record(number, "row", _without_filled_keys(value) if isinstance(value, dict) else value)


def _without_filled_keys(row: dict[str, Any]) -> dict[str, Any]:
    return {name: _stripped(value) if isinstance(value, list | dict) else value for name, value in row.items()}


def _stripped(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _stripped(inner) for name, inner in value.items() if inner is not None}
    return [_stripped(inner) for inner in value] if isinstance(value, list) else value


def _row_value(batch: Any, row: int) -> Any:
    try:
        return batch.slice(row, 1).to_pylist()[0]
    except UnicodeDecodeError:
        return Unreadable("not UTF-8")
