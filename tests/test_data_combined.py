"""Limits on conversations that come in several parts, in copies and from several sources: every count is exact."""

import json
import threading
from collections import Counter

import pytest

from tiny_data import build_recipe, write_jsonl
from tiny_models import CHATML, build_tiny_tokenizer
from tunebook.data.prepare import prepare_data
from tunebook.errors import Refused

pytestmark = pytest.mark.slow

# Leaves the thoughts out of every answer but the last, so that each thought begins a row of its own.
FORGETFUL = CHATML.replace(
    "m['content'] +",
    "(m['content'].split('</think>')[-1] if m.role == 'assistant' and not loop.last else m['content']) +",
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A fresh cache for each test, and batches so small that rows come in many."""
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tunebook.data.batches._BATCH_ROWS", 3)


def talk(number):
    """Return a conversation of one to three answers of different lengths, some with thoughts."""
    turns = []
    for place in range(1 + number % 3):
        thought = "<think>a</think>" if number % 2 else ""
        turns += [
            {"role": "user", "content": f"Count {number} " + "word " * (number % 5)},
            {"role": "assistant", "content": thought + "one " * (1 + (3 * number + 5 * place) % 11)},
        ]
    return {"messages": turns}


def prepare(sources, **data):
    recipe = build_recipe(".")
    section = recipe.data.model_validate({"sources": sources, **data})
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = FORGETFUL
    return prepare_data(type(recipe)(**{**vars(recipe), "data": section}), tokenizer)


@pytest.fixture
def sources(tmp_path):
    """Conversations each twice and some once more, and pairs of which one is there twice."""
    first = write_jsonl(tmp_path / "talks.jsonl", [talk(number) for number in range(12)])
    pairs = [{"instruction": f"Say {n}", "output": "two " * (1 + 9 * n)} for n in (0, 1, 2, 3, 1)]
    second = write_jsonl(tmp_path / "pairs.jsonl", [*pairs, {"instruction": "No output"}])
    return [{"path": str(first), "weight": 2.25}, {"path": str(second)}]


SETTINGS = {"deduplicate": True, "max_bad_fraction": 0.2}


def expected(whole, limit, policy):
    """Say row by row what a limit leaves of rows that were prepared without one, in the plainest way."""
    kept, counts = [], Counter()
    for row in whole.train:
        places = [place for place, label in enumerate(row["labels"]) if label != -100]
        left = [place for place in places if place < limit]
        is_longer = row["length"] > limit
        if not left or (is_longer and policy == "drop"):
            counts["dropped"] += 1
            counts["lost"] += len(places)
            continue
        counts["truncated"] += is_longer
        counts["lost"] += len(places) - len(left)
        end = left[-1] + 1
        asked = row["prompt_length"] if row["prompt_length"] < end else 0  # 0: nothing of its last answer is left
        kept.append({"input_ids": row["input_ids"][:end], "labels": row["labels"][:end], "length": end})
        kept[-1]["prompt_length"] = asked
    return kept, (counts["truncated"], counts["dropped"], counts["lost"])


def counts_of(row):
    return row.num_truncated_rows, row.num_dropped_rows, row.response_tokens_lost


@pytest.mark.parametrize("train_on", ["responses", "all"])
@pytest.mark.parametrize("policy", ["truncate", "drop"])
def test_a_limit_does_to_copies_and_parts_what_it_does_to_each_row(sources, policy, train_on):
    # Under `all` a conversation whose template rewrites earlier turns is a bad row, and none is split.
    settings = {**SETTINGS, "max_bad_fraction": 0.2 if train_on == "responses" else 0.9}
    whole = prepare(sources, train_on=train_on, **settings)
    assert whole.num_repeated_rows and whole.num_duplicate_rows and whole.num_bad_rows
    assert bool(whole.num_split_rows) == (train_on == "responses")
    limits = (24, 32, 41, 50, 64)
    limited = [prepare(sources, train_on=train_on, max_length=m, on_overflow=policy, **settings) for m in limits]
    for limit, data in zip(limits, limited, strict=True):
        kept, counts = expected(whole, limit, policy)
        assert list(data.train) == kept
        assert counts_of(data) == counts and counts[2] > 0
        assert data.trained_tokens + data.response_tokens_lost == whole.trained_tokens
        for name in ("num_rows", "num_bad_rows", "num_duplicate_rows", "num_repeated_rows", "num_split_rows"):
            assert getattr(data, name) == getattr(whole, name)
        added = data.num_rows + data.num_repeated_rows + data.num_split_rows
        used = data.num_train_rows + data.num_dropped_rows + data.num_bad_rows + data.num_duplicate_rows
        assert added == used
        num_labelled = data.num_train_rows + data.num_dropped_rows
        assert f"of {num_labelled:,} rows" in data.notes[-1]
        for row in data.truncation_table:
            assert counts_of(row) == expected(whole, row.max_length, policy)[1]
    assert any(data.num_truncated_rows for data in limited) == (policy == "truncate")


def test_copies_and_parts_count_in_the_share_that_may_be_cut(sources):
    data = prepare(sources, max_length=41, **SETTINGS)
    num_lost = data.num_truncated_rows + data.num_dropped_rows
    share = num_lost / (data.num_train_rows + data.num_dropped_rows)
    assert prepare(sources, max_length=41, max_truncated_fraction=share + 1e-6, **SETTINGS).folder == data.folder
    with pytest.raises(Refused, match=f"data.max_truncated_fraction: .*[(]{share:.1%}[)]"):
        prepare(sources, max_length=41, max_truncated_fraction=share - 1e-6, **SETTINGS)


def test_a_longer_row_is_refused_once_by_its_place_whatever_its_copies_and_parts(sources, tmp_path):
    sources[0]["weight"] = 3.0
    whole = prepare(sources, **SETTINGS)
    tokenizer = build_tiny_tokenizer()
    longer, limit = [], 48
    for path in (tmp_path / "talks.jsonl", tmp_path / "pairs.jsonl"):
        for line, row in enumerate(map(json.loads, path.read_text().splitlines()), 1):
            asked = row["messages"][0]["content"] if "messages" in row else row["instruction"]
            lengths = [one["length"] for one in whole.train if f"user\n{asked}<" in tokenizer.decode(one["input_ids"])]
            if max(lengths, default=0) > limit and (path.name, line) != ("pairs.jsonl", 5):
                longer.append((f"{path}:{line}", max(lengths)))
    assert len(longer) > 5
    with pytest.raises(Refused) as refused:
        prepare(sources, max_length=limit, on_overflow="error", **SETTINGS)
    first, *shown = refused.value.problems
    assert first.message.startswith(
        f"{len(longer)} of 16 rows are longer than {limit} tokens (the first 5 are listed; "
    )
    assert [(one.where, one.message) for one in shown] == [(at, f"{length} tokens") for at, length in longer[:5]]


def test_rows_that_the_template_refuses_move_no_other_rows_place(tmp_path, monkeypatch):
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('No system!') }}{% endif %}" + FORGETFUL
    monkeypatch.setattr(f"{__name__}.FORGETFUL", refusing)
    refused_row = {"messages": [{"role": "system", "content": "s"}, *talk(0)["messages"]]}
    long_row = {"messages": [{"role": "user", "content": "Say"}, {"role": "assistant", "content": "one " * 90}]}
    rows = [*[refused_row] * 4, talk(0), long_row, refused_row, talk(3), long_row]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    options = {"max_length": 80, "max_bad_fraction": 0.6}
    with pytest.raises(Refused) as refused:
        prepare([{"path": str(path)}], on_overflow="error", **options)
    first, *shown = refused.value.problems
    assert first.message.startswith("2 of 4 rows are longer than 80 tokens (they are listed; ")
    assert [one.where for one in shown] == [f"{path}:6", f"{path}:9"]
    data = prepare([{"path": str(path)}], on_overflow="drop", **options)
    assert (data.num_bad_rows, data.num_train_rows, data.num_dropped_rows) == (5, 2, 2)
    assert [row.where for row in data.quarantined] == [f"{path}:{line}" for line in (1, 2, 3, 4, 7)]


@pytest.mark.parametrize("policy", ["truncate", "drop"])
def test_what_a_limit_leaves_of_a_conversation_is_held_out_together(sources, policy):
    data = prepare(sources, max_length=50, on_overflow=policy, validation=0.3, answer_rows=20, **SETTINGS)
    tokenizer = build_tiny_tokenizer()
    held, trained = (
        {tokenizer.decode(row["input_ids"]).split("user\n")[1].split("<")[0] for row in rows}
        for rows in (data.evaluation, data.train)
    )
    assert held and trained and not held & trained
    assert len(held) == round(0.3 * len(held | trained))
    for example in data.examples:
        assert tokenizer.decode(list(example.prompt_ids)).endswith(
            f"{example.prompt}<|im_end|>\n<|im_start|>assistant\n"
        )


def test_rows_are_tokenised_in_a_second_thread_and_labelled_in_this_one(sources, monkeypatch):
    from tunebook.data import tokenise

    names = {"encode": set(), "label": set()}
    encode, label = tokenise.TurnEncoder.encode, tokenise.label_turns

    def noted(kind, work):
        def called(*words):
            names[kind].add(threading.current_thread().name.split("_")[0])
            return work(*words)

        return called

    monkeypatch.setattr(tokenise.TurnEncoder, "encode", noted("encode", encode))
    monkeypatch.setattr(tokenise, "label_turns", noted("label", label))
    prepare(sources, **SETTINGS)
    assert names == {"encode": {"one-ahead"}, "label": {threading.current_thread().name}}
