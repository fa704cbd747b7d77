"""Records of json, jsonl and parquet files, one at a time, each with its number in the file."""

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn, TextIO

from tunebook.errors import Problem, Refused

Unit = Literal["line", "row"]
# Enough for a batch of long rows and small against everything else in the process.
_CHUNK_CHARS = 1 << 20
_PARQUET_BATCH_ROWS = 1000


@dataclass(frozen=True)
class Unreadable:
    """Stands in the place of a record that could not be read, with the reason."""

    reason: str


@dataclass(frozen=True)
class Record:
    """One record: `value` is what JSON or parquet holds there, or `Unreadable`; `number` counts from 1.

    `unit` says what `number` counts: physical lines (blank ones too), or the rows of an array or a parquet file.
    """

    number: int
    unit: Unit
    value: Any


def read_records(path: Path, required: Sequence[str], optional: Sequence[str] = ()) -> Iterator[Record]:
    """Yield the records of one file, holding one line, one row or one parquet batch in memory at a time.

    A line that is not JSON or not UTF-8 comes out as `Unreadable`. A parquet file that has the `required` columns
    yields these and the `optional` ones, any other file all that it has. Raises `Refused` where the file is damaged in
    a way that leaves no rows to tell apart.
    """
    if path.suffix.lower() == ".parquet":
        yield from _read_parquet(path, required, optional)
        return
    with path.open("rb") as file:
        is_array = path.suffix.lower() == ".json" and _is_array(path, file)
        file.seek(0)
        if not is_array:
            yield from _read_lines(file)
            return
    # Bytes that are not UTF-8 become lone surrogates here, and the check of the row they stand in reports them.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        yield from _ArrayReader(path, text).records()


def _read_lines(file: BinaryIO) -> Iterator[Record]:
    for number, line in enumerate(file, start=1):
        content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if content.strip():
            yield Record(number, "line", _parse_line(content))


def _parse_line(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Unreadable(f"not UTF-8 (byte {error.start + 1} of the line)")
    except json.JSONDecodeError as error:
        return Unreadable(f"not JSON: {error.msg} (column {error.colno})")
    except RecursionError:
        return Unreadable("not read: JSON nested too deeply")
    except ValueError as error:  # an integer with more digits than Python reads
        return Unreadable(f"not read: {error}")


def _is_array(path: Path, file: BinaryIO) -> bool:
    """Whether a .json file holds an array; False for one object per line, which is common under that name as well."""
    for number, line in enumerate(file, start=1):
        content = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip()
        if content.startswith(b"["):
            return True
        if content:
            if isinstance(_parse_line(content), Unreadable):
                message = "neither an array of rows nor one JSON object per line"
                raise Refused(Problem(message, "Write the rows as [{...}, {...}]", where=f"{path}:{number}"))
            return False
    return False


class _ArrayReader:
    """Reads a JSON array element by element, keeping a chunk of the text and never the whole file."""

    def __init__(self, path: Path, text: TextIO) -> None:
        self.path = path
        self.text = text
        self.buffer = ""
        self.position = 0
        self.lines_before = 0  # line ends in the text that has left the buffer
        self.at_end = False
        self.decoder = json.JSONDecoder()

    def records(self) -> Iterator[Record]:
        self._expect("[")
        number = 0
        closed = self._next_character() == "]"
        while not closed:
            number += 1
            yield Record(number, "row", self._decode())
            separator = self._next_character()
            if separator not in {",", "]"}:
                self._refuse("',' or ']' expected after a row", self.position)
            closed = separator == "]"
            if not closed:
                self.position += 1
                self._next_character()
        self._expect("]")
        if self._next_character():
            self._refuse("text after the end of the array", self.position)

    def _decode(self) -> Any:
        while True:
            try:
                value, end = self.decoder.raw_decode(self.buffer, self.position)
            except json.JSONDecodeError as error:
                if self.at_end or not self._may_be_cut(error):
                    self._refuse(error.msg, error.pos)
            except RecursionError:
                self._refuse("nested too deeply", self.position)
            except ValueError as error:  # an integer with more digits than Python reads
                self._refuse(str(error), self.position)
            else:
                # A number that ends with the buffer may go on in the next chunk.
                if end < len(self.buffer) or self.at_end:
                    self.position = end
                    return value
            self._read_more()

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        """Whether the error can come from the end of the buffer; no JSON token but a string is longer than 9."""
        return error.msg.startswith("Unterminated string") or error.pos >= len(self.buffer) - 16

    def _read_more(self) -> None:
        """Append at least as much as there is, so that a row of any length is decoded few times."""
        self.lines_before += self.buffer.count("\n", 0, self.position)
        rest = self.buffer[self.position :]
        chunk = self.text.read(max(_CHUNK_CHARS, len(rest)))
        self.at_end = not chunk
        self.buffer = rest + chunk
        self.position = 0

    def _next_character(self) -> str:
        """Skip blanks and return the character there without consuming it; an empty string at the end."""
        while True:
            while self.position < len(self.buffer) and self.buffer[self.position] in " \t\r\n":
                self.position += 1
            if self.position < len(self.buffer):
                return self.buffer[self.position]
            if self.at_end:
                return ""
            self._read_more()

    def _expect(self, character: str) -> None:
        if self._next_character() != character:
            self._refuse(f"{character!r} expected", self.position)
        self.position += 1

    def _refuse(self, reason: str, position: int) -> NoReturn:
        line = self.lines_before + self.buffer.count("\n", 0, position) + 1
        raise Refused(Problem(f"not JSON: {reason}", "Repair the array", where=f"{self.path}:{line}"))


def needed_columns(names: Sequence[str], required: Sequence[str], optional: Sequence[str]) -> list[str] | None:
    """Return which of the columns `names` to read; None for all, where a required one is missing."""
    if any(name not in names for name in required):
        return None
    return [name for name in (*required, *optional) if name in names]


def _read_parquet(path: Path, required: Sequence[str], optional: Sequence[str]) -> Iterator[Record]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            columns = needed_columns(file.schema_arrow.names, required, optional)
            batches = file.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=columns)
            yield from records_of_batches(batches)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise Refused(Problem(f"not a readable parquet file: {reason}", "Write it again", where=str(path))) from error


def records_of_batches(batches: Iterable[Any]) -> Iterator[Record]:
    """Yield the rows of Arrow record batches or tables as `Record`s numbered from 1."""
    number = 0
    for batch in batches:
        try:
            values = batch.to_pylist()
        except UnicodeDecodeError:
            values = [_row_value(batch, row) for row in range(batch.num_rows)]
        for value in values:
            number += 1
            yield Record(number, "row", value)


def _row_value(batch: Any, row: int) -> Any:
    try:
        return batch.slice(row, 1).to_pylist()[0]
    except UnicodeDecodeError:
        return Unreadable("not UTF-8")
