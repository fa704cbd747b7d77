"""Records of data files, one at a time, each with its number in the file; json and jsonl are read here."""

import codecs
import json
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TextIO

from tunebook.data.record import Record, Unreadable, Wanted
from tunebook.data.tables import open_bytes, read_arrow_records, read_csv_records
from tunebook.errors import Problem, Refused
from tunebook.system.places import data_suffix

# Enough for a batch of long rows and small against everything else in the process.
_CHUNK_CHARS = 1 << 20


def read_records(path: Path, wanted: Wanted) -> Iterator[Record]:
    """Yield the records of one file, holding one line, one row or one Arrow batch in memory at a time.

    A line that is not JSON, not UTF-8 or without as many fields as the header comes out as `Unreadable`. Of a parquet
    or arrow file the columns that `wanted` chooses from all are read. Raises `Refused` where the file is damaged in a
    way that leaves no rows to tell apart.
    """
    suffix = data_suffix(path)
    if suffix in (".parquet", ".arrow"):
        yield from read_arrow_records(path, wanted)
        return
    _check_encoding(path)
    if suffix.startswith(".csv"):
        with open_bytes(path) as file:
            yield from read_csv_records(path, file)
    else:
        yield from _read_json(path, suffix)


def _check_encoding(path: Path) -> None:
    """Refuse a text of wide characters, which has a zero in every ASCII character, also where no BOM tells it."""
    with open_bytes(path) as file:
        begin = file.read(8)
    encoding = json.detect_encoding(begin)
    # Zeros alone are a damaged file.
    if encoding.startswith(("utf-16", "utf-32")) and begin.decode(encoding, "replace").strip(
        "\0\N{REPLACEMENT CHARACTER}"
    ):
        message = f"{encoding[:6].upper()} text, UTF-8 expected"
        fix = f"Convert it: iconv -f {encoding[:6].upper()} -t UTF-8"
        raise Refused(Problem(message, fix, where=str(path)))


def _read_json(path: Path, suffix: str) -> Iterator[Record]:
    is_array = False
    if suffix.startswith(".json") and not suffix.startswith(".jsonl"):
        with open_bytes(path) as file:
            is_array = _is_array(path, file)
    with open_bytes(path) as file:
        if not is_array:
            yield from _read_lines(file)
            return
        # Bytes that are not UTF-8 become lone surrogates here, and the check of the row they stand in reports them.
        with TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
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
