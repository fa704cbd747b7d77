"""All rows are looked at before anything is made of them, and each bad one is named or counted."""

import io
import json

import pytest

from tiny_data import CASES, build_recipe, write_jsonl
from tunebook.data.conversation import pair
from tunebook.data.quarantine import BadRow, check_bad_fraction, read_quarantine
from tunebook.data.rows import read_good_rows, scan_rows
from tunebook.data.sources import open_source
from tunebook.errors import Refused

ROW = {"instruction": "a", "input": "", "output": "b"}


def source_of(path, **data):
    return open_source(build_recipe(path, **data).data)


def scan(source, tmp_path):
    """Scan and return the counts and the bad rows, read back from the quarantine file."""
    file = tmp_path / "quarantine"
    with file.open("w") as quarantine:
        counts = scan_rows(source, quarantine)
    return counts, list(read_quarantine(file, source.names))


def refusal(source):
    with pytest.raises(Refused) as refused:
        scan_rows(source, io.StringIO())
    return refused.value


def test_bad_rows_are_named_with_file_line_and_field(tmp_path):  # case D03
    path = CASES / "D03" / "data.jsonl"
    counts, bad_rows = scan(source_of(path), tmp_path)
    assert (counts.num_rows, counts.num_bad_rows) == (4, 2)
    assert [row.where for row in bad_rows] == [f"{path}:3", f"{path}:4"]
    assert [row.field for row in bad_rows] == ["output", "instruction"]
    with pytest.raises(Refused) as refused:
        check_bad_fraction(4, 2, iter(bad_rows), 0.001)
    lines = str(refused.value).splitlines()
    assert lines[0] == "refused: 3 problems"
    assert "data.max_bad_fraction: 2 of 4 rows can't be used (they are listed), 0.001 of them may" in lines[1]
    assert lines[2].strip() == f"{path}:3: output is null"
    assert lines[3].strip() == f"{path}:4: instruction is the number 42, text expected"


def test_broken_lines_are_bad_rows_with_their_physical_line(tmp_path):  # case D05
    counts, bad_rows = scan(source_of(CASES / "D05" / "data.jsonl"), tmp_path)
    assert (counts.num_rows, counts.num_bad_rows) == (4, 2)
    assert [row.number for row in bad_rows] == [3, 5]
    assert all("not JSON" in row.reason for row in bad_rows)


@pytest.mark.parametrize("name", ["caps.jsonl", "chat.jsonl"])
def test_other_columns_are_one_problem_not_one_per_row(name):  # case D09
    problems = refusal(source_of(CASES / "D09" / name, format="alpaca")).problems
    assert len(problems) == 1
    assert "found; an alpaca row has instruction, output" in problems[0].message


def test_other_columns_are_told_apart_by_themselves(tmp_path):  # case D09
    assert "columns: {prompt: Instruction" in str(refusal(source_of(CASES / "D09" / "caps.jsonl")))
    assert "not the comma but the semicolon" in str(refusal(source_of(CASES / "D09" / "semi.csv")))
    counts, bad_rows = scan(source_of(CASES / "D09" / "chat.jsonl"), tmp_path)
    assert (counts.num_rows, counts.forms, bad_rows) == (1, ("sharegpt",), [])


def test_other_columns_are_found_without_reading_a_long_file_to_its_end(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "response": "b"}] * 1000)
    source = source_of(path)
    num_read = 0

    def counted(part):
        nonlocal num_read
        for record in type(source).records(source, part):
            num_read += 1
            yield record

    object.__setattr__(source, "records", counted)
    assert "{prompt: prompt, response: response}" in str(refusal(source))
    assert num_read == 100


def test_a_column_that_some_rows_lack_is_their_fault_not_the_files(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"instruction": "a"}, ROW, ROW])
    counts, bad_rows = scan(source_of(path), tmp_path)
    assert (counts.num_rows, counts.num_bad_rows) == (3, 1)
    assert bad_rows == [BadRow(str(path), 1, "line", "output", "output is missing")]


def test_problems_of_all_files_come_together(tmp_path):
    (tmp_path / "rows").mkdir()
    write_jsonl(tmp_path / "rows" / "a.jsonl", [{"Instruction": "a", "Output": "b"}])
    (tmp_path / "rows" / "b.json").write_text("[1,")
    (tmp_path / "rows" / "c.jsonl").write_text("\n\n")
    write_jsonl(tmp_path / "rows" / "d.jsonl", [ROW])
    text = str(refusal(source_of(tmp_path / "rows")))
    assert text.startswith("refused: 3 problems")
    assert all(name in text for name in ("a.jsonl", "b.json:1", "no rows in"))


def test_rows_of_a_folder_come_in_the_order_of_the_names(tmp_path):
    rows = [ROW | {"output": name} for name in "abc"]
    write_jsonl(tmp_path / "2.jsonl", [rows[1], {"output": 3}])
    (tmp_path / "1.json").write_text(json.dumps(rows[:1]))
    write_jsonl(tmp_path / "3.jsonl", rows[2:])
    source = source_of(tmp_path)
    assert [placed.row for placed in read_good_rows(source)] == [pair("a", name) for name in "abc"]


def test_rows_of_arrays_are_numbered_as_rows(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([ROW, {"instruction": "a", "output": None}]))
    _, bad_rows = scan(source_of(tmp_path / "a.json"), tmp_path)
    assert bad_rows[0].where == f"{tmp_path / 'a.json'} row 2"


def test_few_bad_rows_pass_and_the_limit_is_a_share_of_all_rows():
    bad = [BadRow("a.jsonl", number, "line", "output", "output is null") for number in range(1, 12)]
    check_bad_fraction(1000, 1, iter(bad), 0.001)
    check_bad_fraction(2, 2, iter(bad), 1.0)
    check_bad_fraction(5, 0, iter([]), 0.0)
    with pytest.raises(Refused) as refused:
        check_bad_fraction(1000, 11, iter(bad), 0.001)
    assert len(refused.value.problems) == 6
    assert "11 of 1000 rows can't be used (the first 5 are listed)" in str(refused.value)


def test_the_digest_follows_content_and_not_names(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", [ROW])
    second = write_jsonl(tmp_path / "b.jsonl", [ROW])
    assert source_of(first).content_digest() == source_of(second).content_digest()
    write_jsonl(second, [ROW | {"output": "c"}])
    assert source_of(first).content_digest() != source_of(second).content_digest()


def test_a_wrong_path_is_refused_before_reading(tmp_path):  # case S03
    with pytest.raises(Refused, match=r"no rows in .*data\.jsonl"):
        source_of(CASES / "S03" / "data.jsonl")
    with pytest.raises(Refused, match="does not exist"):
        source_of(tmp_path / "nothing.jsonl")
