"""The data section of a recipe: sources, columns, forms and templates, each mistake at its place."""

import pytest

from tunebook.errors import Refused
from tunebook.recipe.reading import load_recipe, write_resolved

BASE = "model:\n  name_or_path: org/model\ndata:\n"


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Read a recipe with this data section, in a folder with two files of rows."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("{}\n")

    def read(data, *overrides):
        (tmp_path / "case.yaml").write_text(BASE + data)
        return load_recipe("case.yaml", overrides)

    return read


def problems(read, data, *overrides):
    with pytest.raises(Refused) as refused:
        read(data, *overrides)
    return [problem.render() for problem in refused.value.problems]


def test_sources_have_their_own_settings_and_inherit_form_and_columns(read):
    recipe = read(
        "  format: prompt_completion\n  columns: {prompt: question, response: answer}\n"
        "  sources:\n  - path: a.jsonl\n    weight: 2\n  - path: org/rows\n    revision: v1\n    split: test\n"
        "    rows: 10\n    format: text\n    columns: {text: body}\n"
    )
    first, second = recipe.data.all_sources()
    assert (first.format, first.columns, first.weight, first.key) == (
        "prompt_completion", {"prompt": "question", "response": "answer"}, 2.0, "data.sources[0]",
    )  # fmt: skip
    assert (second.format, second.columns, second.rows, second.split, second.revision) == (
        "text", {"text": "body"}, 10, "test", "v1",
    )  # fmt: skip


def test_a_single_path_is_one_source(read):
    [source] = read("  path: a.jsonl\n").data.all_sources()
    assert (source.path, source.format, source.split, source.weight, source.key) == (
        "a.jsonl", "auto", "train", 1.0, "data",
    )  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [
        "  sources:\n  - {path: a.jsonl, weight: 0.5}\n  - {path: b.jsonl, rows: 3, columns: {text: body}}\n",
        "  path: a.jsonl\n  columns: {prompt: q, response: a}\n  train_on: last_response\n  template: chatml\n",
        "  path: '*.jsonl'\n  deduplicate: true\n",
    ],
)
def test_the_resolved_recipe_reads_back_to_the_same(read, tmp_path, data):
    recipe = read(data)
    write_resolved(recipe, tmp_path / "again.yaml")
    again = load_recipe("again.yaml")
    assert again.data == recipe.data
    assert again.resolved == recipe.resolved


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("  max_length: 9\n", ["data.path: is missing"]),
        ("  path: a.jsonl\n  sources: [{path: b.jsonl}]\n", ["case.yaml:4: data.path: is given beside sources"]),
        ("  sources: []\n", ["data.sources: expected a list of places"]),
        ("  sources: a.jsonl\n", ["data.sources: expected a list of places"]),
        ("  sources: [a.jsonl]\n", ["data.sources[0]: expected a place with its keys"]),
        ("  sources:\n  - path: a.jsonl\n  - wieght: 2\n    path: b.jsonl\n",
         ["case.yaml:6: data.sources[1].wieght: unknown key. Nearest: weight"]),
        ("  sources:\n  - weight: 2\n", ["data.sources[0].path: is missing"]),
        ("  sources:\n  - {path: a.jsonl, weight: much}\n",
         ["data.sources[0].weight: got the text 'much', expected a number"]),
        ("  sources:\n  - {path: a.jsonl, weight: 0}\n", ["data.sources[0].weight: got 0"]),
        ("  sources:\n  - {path: a.jsonl, weight: -1}\n", ["data.sources[0].weight: got -1"]),
        ("  sources:\n  - {path: a.jsonl, rows: 0}\n", ["data.sources[0].rows: got 0"]),
        ("  sources:\n  - {path: a.jsonl, rows: 5, weight: 2}\n", ["data.sources[0].rows: is given beside weight"]),
        ("  sources:\n  - {path: c.jsonl}\n", ["data.sources[0].path: file c.jsonl does not exist"]),
        ("  sources:\n  - {path: a.jsonl, split: test}\n", ["data.sources[0].split: has no effect on local files"]),
        ("  sources:\n  - {path: a.jsonl, format: csv}\n",
         ["data.sources[0].format: got the text 'csv', expected auto"]),
        ("  sources:\n  - {path: a.jsonl, path: b.jsonl}\n", ["data.sources[0].path: is given 2 times"]),
        ("  revision: v1\n  sources:\n  - {path: org/rows}\n", ["data.revision: is given beside sources"]),
        ("  path: '*.csv'\n", ["data.path: no file matches *.csv"]),
        ("  path: a.jsonl\n  format: shareGPT\n",
         ["data.format: got the text 'shareGPT', expected auto, alpaca, messages"]),
        ("  path: a.jsonl\n  columns: {question: q}\n", ["data.columns: question is no part of a row"]),
        ("  path: a.jsonl\n  columns: {respnse: a, prompt: q}\n", ["respnse is no part of a row. Nearest: response"]),
        ("  path: a.jsonl\n  columns: {prompt: q, text: t}\n", ["data.columns: no form has all of prompt, text"]),
        ("  path: a.jsonl\n  columns: {prompt: 3}\n", ["data.columns"]),
        ("  path: a.jsonl\n  format: text\n  columns: {prompt: q}\n", ["prompt is no part of the form text"]),
        ("  path: a.jsonl\n  template: chatlm\n", ["data.template: got 'chatlm', expected auto, alpaca, chatml"]),
        ("  path: a.jsonl\n  template: mine.jinja\n", ["data.template: file mine.jinja does not exist"]),
        ("  path: a.jsonl\n  train_on: answers\n", ["data.train_on: got the text 'answers', expected responses"]),
        ("  path: a.jsonl\n  deduplicate: 1\n", ["data.deduplicate: got 1, expected true or false"]),
    ],
)  # fmt: skip
def test_a_mistake_is_named_at_its_place(read, data, expected):
    found = problems(read, data)
    assert len(found) == len(expected), found
    for text, part in zip(found, expected, strict=True):
        assert part in text


def test_sources_can_be_given_on_the_command_line(read):
    recipe = read("  path: a.jsonl\n", "data.path=null", "data.sources=[{path: b.jsonl, rows: 2}]")
    [source] = recipe.data.all_sources()
    assert (source.path, source.rows) == ("b.jsonl", 2)
