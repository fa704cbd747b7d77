"""Several places of rows: how often each counts, what is left out, and that every row is counted."""

import json
from collections import Counter

import pytest

from tiny_data import build_recipe, write_jsonl
from tiny_models import build_tiny_tokenizer
from tunebook.data.prepare import prepare_data, write_quarantine
from tunebook.errors import Refused
from tunebook.plan.planning import render_data

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A fresh cache for each test."""
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def places(tmp_path):
    """Two files of other forms, ten rows each."""
    write_jsonl(tmp_path / "a.jsonl", [{"instruction": f"a{n}", "output": f"one {n}"} for n in range(10)])
    turns = [[{"from": "human", "value": f"b{n}"}, {"from": "gpt", "value": f"two {n}"}] for n in range(10)]
    write_jsonl(tmp_path / "b.jsonl", [{"conversations": turn} for turn in turns])
    return str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")


def prepare(sources, seed=0, **data):
    recipe = build_recipe(".", seed=seed)
    section = recipe.data.model_validate({"sources": sources, **data})
    return prepare_data(type(recipe)(**{**vars(recipe), "data": section}), build_tiny_tokenizer())


def answers(rows):
    tokenizer = build_tiny_tokenizer()
    kept = [[label for label in row["labels"] if label != -100] for row in rows]
    return Counter(tokenizer.decode(labels).removesuffix("<|im_end|>") for labels in kept)


def adds_up(data):
    left = data.num_rows + data.num_repeated_rows + data.num_split_rows
    used = data.num_train_rows + data.num_eval_rows + data.num_dropped_rows
    return left == used + data.num_bad_rows + data.num_duplicate_rows + data.num_unused_rows


def test_sources_come_one_after_another_each_in_its_form(places):
    data = prepare([{"path": place} for place in places])
    assert list(answers(data.train)) == [f"{word} {n}" for word in ("one", "two") for n in range(10)]
    assert data.forms == ("alpaca", "sharegpt")
    assert adds_up(data)


def test_weights_and_row_counts_are_exact_and_follow_the_seed(places):
    sources = [{"path": places[0], "weight": 2.5}, {"path": places[1], "rows": 3}]
    data = prepare(sources)
    counts = answers(data.train)
    assert sum(counts[f"one {n}"] for n in range(10)) == 25
    assert {counts[f"one {n}"] for n in range(10)} == {2, 3}
    assert sorted(count for answer, count in counts.items() if answer.startswith("two")) == [1, 1, 1]
    assert (data.num_rows, data.num_repeated_rows, data.num_unused_rows, data.num_train_rows) == (20, 15, 7, 28)
    assert adds_up(data)
    assert answers(prepare(sources, seed=1).train) != counts
    assert prepare(sources).folder == data.folder
    assert prepare([{"path": places[0], "weight": 2.0}, sources[1]]).data_fingerprint != data.data_fingerprint


def test_copies_of_a_row_are_held_out_together(places):
    data = prepare([{"path": places[0], "weight": 3.0}], validation=0.2)
    held, trained = answers(data.evaluation), answers(data.train)
    assert (len(held), len(trained)) == (2, 8)
    assert not held.keys() & trained.keys()
    assert adds_up(data)


def test_exact_duplicates_are_dropped_where_asked_and_counted(tmp_path, places):
    again = write_jsonl(tmp_path / "c.jsonl", [{"instruction": "a1", "input": " ", "output": "one 1"}] * 2)
    sources = [{"path": places[0]}, {"path": str(again)}]
    assert prepare(sources).num_train_rows == 12
    data = prepare(sources, deduplicate=True)
    assert (data.num_train_rows, data.num_duplicate_rows) == (10, 2)
    assert adds_up(data)


def test_more_rows_than_there_are_is_refused(places):
    with pytest.raises(Refused, match=r"data\.sources\[1\]\.rows: 11 rows are asked of .*b\.jsonl, which has 10"):
        prepare([{"path": places[0]}, {"path": places[1], "rows": 11}])
    with pytest.raises(Refused, match="the weights leave none of the 10 rows"):
        prepare([{"path": places[0], "weight": 0.01}])


def test_bad_rows_of_all_sources_are_named_and_the_line_adds_up(tmp_path, places):
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(
        b'{"text": null}\n{"text": "fine"}\nbroken\n{"text": "\xff"}\n{"text": "\\ud800"}\n{"text": 3}\n[]\n'
    )
    data = prepare([{"path": places[0]}, {"path": str(bad)}, {"path": places[1]}], max_bad_fraction=0.5)
    write_quarantine(data, tmp_path / "quarantine.jsonl")
    entries = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert [(entry["file"], entry["line"]) for entry in entries] == [(str(bad), line) for line in (1, 3, 4, 5, 6, 7)]
    assert [entry["reason"][:22] for entry in entries] == [
        "text is null", "not JSON: Expecting va", "not UTF-8 (byte 11 of ", "text has a lone surrog",
        "text is the number 3, ", "an object with text ex",
    ]  # fmt: skip
    assert data.num_bad_rows == 6
    assert adds_up(data)

    line = render_data(data, 1024)
    assert line.startswith("data: 27 rows (alpaca; text; sharegpt) = 21 to train, 0 held out, 6 unusable")
