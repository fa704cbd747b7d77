"""csv, arrow and compressed files give the records of the plain ones, or say what is wrong with them."""

import gzip
import json

import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from tunebook.data.records import read_records
from tunebook.data.tables import open_bytes
from tunebook.errors import Refused

ROWS = [{"instruction": f"q {number}", "output": "ünï\n" * 3} for number in range(2500)]


def read(path):
    return list(read_records(path, lambda names: None))


def values(path):
    return [record.value for record in read(path)]


def write_zst(path, content):
    with pa.OSFile(str(path), "wb") as file, pa.CompressedOutputStream(file, "zstd") as stream:
        stream.write(content)
    return path


def refusal(path):
    with pytest.raises(Refused) as refused:
        read(path)
    return str(refused.value)


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_compressed_json_is_read_as_it_would_be_plain(tmp_path, suffix):
    text = json.dumps(ROWS) if suffix == ".json" else "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / f"a{suffix}").write_text(text)
    (tmp_path / f"a{suffix}.gz").write_bytes(gzip.compress(text.encode()))
    write_zst(tmp_path / f"a{suffix}.zst", text.encode())
    plain = read(tmp_path / f"a{suffix}")
    assert [record.value for record in plain] == ROWS
    assert read(tmp_path / f"a{suffix}.gz") == read(tmp_path / f"a{suffix}.zst") == plain


def test_joined_compressed_files_are_read_to_the_end(tmp_path):
    lines = [json.dumps(row).encode() + b"\n" for row in ROWS]
    halves = [b"".join(lines[:1000]), b"".join(lines[1000:])]
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(map(gzip.compress, halves)))
    both = [write_zst(tmp_path / name, half).read_bytes() for name, half in zip("xy", halves, strict=True)]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(both))
    assert values(tmp_path / "a.jsonl.gz") == values(tmp_path / "a.jsonl.zst") == ROWS


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", [lambda content: content[: len(content) // 2], lambda content: b"plain text"])
def test_a_damaged_compressed_file_is_refused(tmp_path, suffix, damage):
    text = "".join(json.dumps(row | {"n": str(hash(str(row)))}) + "\n" for row in ROWS).encode()
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(gzip.compress(text)) if suffix == ".gz" else write_zst(path, text)
    path.write_bytes(damage(path.read_bytes()))
    assert f"{path}: can't be decompressed: " in refusal(path)


def test_an_open_file_is_closed_again(tmp_path):
    write_zst(tmp_path / "a.jsonl.zst", b"{}\n" * 1000)
    with open_bytes(tmp_path / "a.jsonl.zst") as file:
        assert file.readline() == b"{}\n"
        assert not file.closed


def test_csv_rows_have_the_columns_of_the_header_and_the_line_they_begin_on(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes('\ufeffinstruction, output\r\na,b\r\n\r\n"x\r\ny","say ""hi"", 日本"\r\nc,\r\n'.encode())
    assert [(record.number, record.value) for record in read(path)] == [
        (2, {"instruction": "a", "output": "b"}),
        (4, {"instruction": "x\r\ny", "output": 'say "hi", 日本'}),
        (6, {"instruction": "c", "output": ""}),
    ]
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert read(tmp_path / "a.csv.gz") == read(path)


def test_csv_rows_of_another_width_or_with_stray_quotes_are_told_apart(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'a,b\n1,2\n1\n1,2,3\n"1"2,3\n4,\xff\n5,6\n')
    records = read(path)
    assert [record.number for record in records] == [2, 3, 4, 5, 6, 7]
    assert [getattr(record.value, "reason", "")[:38] for record in records] == [
        "", "1 fields, and the header has 2", "3 fields, and the header has 2",
        "not csv: ',' expected after '\"'", "", "",
    ]  # fmt: skip
    assert records[4].value == {"a": "4", "b": "\udcff"}
    assert records[5].value == {"a": "5", "b": "6"}


def test_a_field_longer_than_pythons_limit_is_read(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n" + "x" * 200_000 + ",y\n")
    assert len(values(tmp_path / "a.csv")[0]["a"]) == 200_000


def test_a_csv_file_that_can_not_be_told_apart_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('a,b\n1,2\n"never closed,3\n4,5\n')
    assert f"{path}:3: a quote that opens here never closes" in refusal(path)
    path.write_text("a,b,a\n1,2,3\n")
    assert f"{path}:1: two columns are called 'a'" in refusal(path)


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_arrow_files_of_both_kinds_are_read(tmp_path, kind):
    table = pa.Table.from_pylist(ROWS)
    writer = ipc.new_stream if kind == "stream" else ipc.new_file
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, writer(file, table.schema) as stream:
        stream.write_table(table)
    assert values(tmp_path / "a.arrow") == ROWS
    chosen = list(read_records(tmp_path / "a.arrow", lambda names: ["output"]))
    assert chosen[0].value == {"output": ROWS[0]["output"]}
    assert (chosen[-1].number, chosen[-1].unit) == (2500, "row")


@pytest.mark.parametrize(
    "content", [b"", b"ARROW1 not really", b"no arrow at all", b"\xff\xff\xff\xff\x10\x00\x00\x00"]
)
def test_a_damaged_arrow_file_is_refused(tmp_path, content):
    (tmp_path / "a.arrow").write_bytes(content)
    assert "a.arrow: not a readable arrow file" in refusal(tmp_path / "a.arrow")


def test_keys_that_arrow_fills_in_are_left_out_of_nested_values(tmp_path):
    turns = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]]
    parquet.write_table(pa.table({"messages": turns, "id": [None]}), tmp_path / "a.parquet")
    assert values(tmp_path / "a.parquet") == [
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"name": "f"}]}],
            "id": None,
        }
    ]
