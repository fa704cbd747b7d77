"""Records come out one by one, numbered as the file counts them, whatever made the file."""

import gzip
import json
import tracemalloc

import pyarrow as pa
import pytest
from pyarrow import parquet

from tiny_data import CASES
from tunebook.data.records import _ArrayReader, read_records
from tunebook.errors import Refused


def wanted(names):
    """The columns of an alpaca row, or all."""
    needed = [name for name in ("instruction", "input", "output") if name in names]
    return needed if {"instruction", "output"} <= set(names) else None


ROWS = [{"instruction": f"question {number}", "output": "ünï\n" * 5} for number in range(7)]


def read(path):
    return list(read_records(path, wanted))


def values(path):
    return [record.value for record in read(path)]


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
def test_bom_and_crlf_are_read_as_usual(name):  # case D07
    rows = values(CASES / "D07" / name)
    assert rows == [
        {"instruction": "Name a color.", "input": "", "output": "red"},
        {"instruction": "Count.", "input": "", "output": "one two three"},
    ]


def test_lines_keep_their_physical_number(tmp_path):
    path = write(tmp_path / "a.jsonl", '\n{"a": 1}\r\n   \n\n{"a": 2}')
    assert [(record.number, record.unit) for record in read(path)] == [(2, "line"), (5, "line")]


def test_broken_lines_are_told_apart_from_the_rest():  # case D05
    records = read(CASES / "D05" / "data.jsonl")
    assert [record.number for record in records] == [1, 2, 3, 5]
    assert [isinstance(record.value, dict) for record in records] == [True, True, False, False]
    assert "column" in records[2].value.reason


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"output": "\xff"}', "not UTF-8 (byte 13 of the line)"),
        (b'{"a": 1}{"b": 2}', "not JSON: Extra data (column 9)"),
        (b"[" * 100_000, "not read: JSON nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not read: Exceeds the limit"),
        (b"plain text", "not JSON: Expecting value (column 1)"),
    ],
    ids=["utf8", "two objects", "nested", "huge number", "text"],
)
def test_an_unreadable_line_says_why(tmp_path, line, reason):
    first, second = read(write(tmp_path / "a.jsonl", line + b'\n{"a": 1}\n'))
    assert first.value.reason.startswith(reason)
    assert second.value == {"a": 1}


def test_a_line_separator_inside_a_text_is_no_line_end(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"a": "x\u2028y\x85z"}\n{"a": 2}\n')
    assert [record.number for record in read(path)] == [1, 2]


def test_a_json_file_may_hold_an_array_or_lines(tmp_path):
    array = write(tmp_path / "array.json", json.dumps(ROWS, indent=2))
    lines = write(tmp_path / "lines.json", "\n".join(map(json.dumps, ROWS)))
    assert values(array) == values(lines) == ROWS
    assert [record.number for record in read(array)] == [1, 2, 3, 4, 5, 6, 7]
    assert {record.unit for record in read(array)} == {"row"}


@pytest.mark.parametrize("content", ["", "[]", " [ ] \n", "\ufeff\n"])
def test_no_rows_are_no_records(tmp_path, content):
    assert read(write(tmp_path / "a.json", content)) == []


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 64])
def test_an_array_is_the_same_however_its_text_is_cut(tmp_path, monkeypatch, size):
    monkeypatch.setattr("tunebook.data.records._CHUNK_CHARS", size)
    rows = [*ROWS, 12, -1.5e10, "text", None, True, [], {}, [1, [2]], 123456789]
    assert values(write(tmp_path / "a.json", json.dumps(rows))) == rows
    assert values(write(tmp_path / "b.json", "[ 1,\r\n 2\t,3 ]\n")) == [1, 2, 3]


@pytest.mark.parametrize(
    ("content", "where", "reason"),
    [
        ('[{"a": 1}\n{"a": 2}]', ":2", "',' or ']' expected"),
        ('[{"a": 1},\n\n{"a": }]', ":3", "Expecting value"),
        ('[{"a": 1},\n]', ":2", "Expecting value"),
        ('[{"a": 1}', ":1", "',' or ']' expected"),
        ('[\n{"a": "never closed', ":2", "Unterminated string"),
        ("[1]\n[2]", ":2", "after the end"),
        ('{\n  "data": [1]\n}', ":1", "neither an array of rows nor one JSON object per line"),
    ],
)
def test_a_broken_array_is_refused_at_its_line(tmp_path, content, where, reason):
    path = write(tmp_path / "a.json", content)
    with pytest.raises(Refused) as refused:
        read(path)
    assert f"{path}{where}: " in str(refused.value)
    assert reason in str(refused.value)


def test_bytes_that_are_not_utf8_in_an_array_stay_visible(tmp_path):
    path = write(tmp_path / "a.json", b'[{"output": "\xff"}, {"output": "fine"}]')
    assert values(path) == [{"output": "\udcff"}, {"output": "fine"}]


def test_an_array_is_not_held_in_memory(tmp_path):
    row = json.dumps({"instruction": "x" * 1000, "output": "y"})
    path = write(tmp_path / "a.json", b"[" + b",\n".join([row.encode()] * 20_000) + b"]")
    assert path.stat().st_size > 19 << 20
    tracemalloc.start()
    assert sum(1 for _ in read_records(path, wanted)) == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize(("name", "text"), [("a.jsonl", '{"a": 1}'), ("a.json", '[{"a": 1}]'), ("a.csv", "a,b\n1,2")])
def test_a_wide_character_file_is_refused_as_such(tmp_path, name, text, encoding):
    path = write(tmp_path / name, text.encode(encoding))
    with pytest.raises(
        Refused, match=rf"{name}: {encoding[:6].upper()} text, UTF-8 expected.*iconv -f {encoding[:6].upper()}"
    ):
        values(path)


def test_a_compressed_wide_character_file_is_refused_and_one_of_zeros_is_not_called_so(tmp_path):
    path = write(tmp_path / "a.jsonl.gz", gzip.compress('{"a": 1}'.encode("utf-16")))
    with pytest.raises(Refused, match="UTF-16 text"):
        values(path)
    [zeros] = values(write(tmp_path / "b.jsonl", bytes(100)))
    assert "not JSON" in zeros.reason


def test_parquet_gives_only_the_columns_that_rows_need(tmp_path):
    table = pa.table({"output": ["b", None], "instruction": ["a", "c"], "picture": [b"0", b"1"]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert values(tmp_path / "a.parquet") == [
        {"instruction": "a", "output": "b"},
        {"instruction": "c", "output": None},
    ]
    parquet.write_table(table.drop_columns("output"), tmp_path / "b.parquet")
    assert set(values(tmp_path / "b.parquet")[0]) == {"instruction", "picture"}


def test_text_in_parquet_that_is_not_utf8_spoils_its_own_row_only(tmp_path):
    raw = pa.Array.from_buffers(pa.string(), 3, pa.array([b"fine", b"\xff\xfe", b"good"]).buffers())
    parquet.write_table(pa.table({"instruction": raw, "output": ["1", "2", "3"]}), tmp_path / "a.parquet")
    first, second, third = read(tmp_path / "a.parquet")
    assert (first.value["instruction"], third.value["instruction"]) == ("fine", "good")
    assert (second.number, second.value.reason) == (2, "not UTF-8")


def test_a_damaged_parquet_file_is_refused(tmp_path):
    path = write(tmp_path / "a.parquet", b"PAR1 not really")
    with pytest.raises(Refused, match=r"a\.parquet: not a readable parquet file"):
        read(path)


def test_a_row_longer_than_a_chunk_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("tunebook.data.records._CHUNK_CHARS", 16)
    rows = [{"a": "x" * 10_000}, {"a": 'quote " and \\ backslash'}]
    path = write(tmp_path / "a.json", json.dumps(rows))
    with path.open(encoding="utf-8") as text:
        reader = _ArrayReader(path, text)
        assert [record.value for record in reader.records()] == rows
        assert len(reader.buffer) < 20_100
