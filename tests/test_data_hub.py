"""A data set of the Hub is a source like any other, and says in one line why it can't be had."""

import os
import subprocess
import sys

import pytest

from tiny_data import build_recipe
from tunebook.data.conversation import pair
from tunebook.data.rows import read_good_rows, scan_rows
from tunebook.data.sources import open_source
from tunebook.errors import Refused
from tunebook.recipe.schema import DataSource

pytestmark = pytest.mark.slow

COLUMNS = {"output": ["b", "d", None], "input": ["", None, ""], "instruction": ["a", "c", "e"], "text": ["x", "y", "z"]}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Let `load_dataset` answer from a data set on disk, and record what it was asked for."""
    import datasets

    datasets.Dataset.from_dict(COLUMNS).save_to_disk(str(tmp_path / "saved"))
    asked = []

    def load(path, **options):
        asked.append((path, options))
        return datasets.load_from_disk(str(tmp_path / "saved"))

    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked


def test_rows_come_from_the_split_and_revision_of_the_recipe(hub, tmp_path):
    source = open_source(build_recipe("org/rows", revision="v1", split="train[:3]").data)
    assert hub == [("org/rows", {"revision": "v1", "split": "train[:3]"})]
    assert [placed.row for placed in read_good_rows(source)] == [pair("a", "b"), pair("c", "d")]
    with (tmp_path / "quarantine").open("w") as quarantine:
        counts = scan_rows(source, quarantine)
    assert (counts.num_rows, counts.num_bad_rows) == (3, 1)
    assert set(next(source.records(0)).value) == {"instruction", "input", "output"}


def test_the_digest_follows_the_content(hub, tmp_path):
    import datasets

    first = open_source(build_recipe("org/rows").data).content_digest()
    assert open_source(build_recipe("org/rows").data).content_digest() == first
    changed = COLUMNS | {"output": ["b", "d", "f"]}
    datasets.Dataset.from_dict(changed).save_to_disk(str(tmp_path / "saved2"))
    assert len(first) == 64
    from tunebook.data.hub import HubSource

    assert (
        HubSource(
            "org/rows", datasets.load_from_disk(str(tmp_path / "saved2")), DataSource(path="org/rows")
        ).content_digest()
        != first
    )


@pytest.mark.parametrize(
    ("name", "text", "message", "key"),
    [
        ("DatasetNotFoundError", "Dataset 'org/x' doesn't exist on the Hub", "no data set of that name", "data.path"),
        ("DatasetNotFoundError", "Dataset 'org/x' is a gated dataset on the Hub.", "is gated", "data.path"),
        ("DatasetNotFoundError", "Revision 'v1' doesn't exist", "has no revision 'v1'", "data.revision"),
        ("DataFilesNotFoundError", "No (supported) data files found in org/x", "No (supported) data", "data.path"),
        ("ValueError", 'Unknown split "tran". Should be one of', 'Unknown split "tran"', "data.split"),
        ("ConnectionError", "Couldn't reach 'org/x' on the Hub", "the Hub can't be reached", "data.path"),
    ],
)
def test_what_the_hub_says_is_said_in_one_line(monkeypatch, name, text, message, key):
    import builtins

    import datasets

    error = getattr(datasets.exceptions, name, None) or getattr(builtins, name)

    def fail(path, **options):
        raise error(text)

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(Refused) as refused:
        open_source(build_recipe("org/x", revision="v1").data)
    assert message in str(refused.value)
    assert refused.value.problems[0].key == key
    assert "\n" not in str(refused.value)


def test_without_a_network_both_loaders_refuse_and_show_no_trace(tmp_path):
    code = (
        "from tunebook.data.hub import load_hub_source\n"
        "from tunebook.data.tokenizer import load_tokenizer\n"
        "from tunebook.errors import Refused\n"
        "from tunebook.recipe.schema import DataSource\n"
        "rows = DataSource(path='org/rows')\n"
        "for load in (lambda: load_hub_source(rows), lambda: load_tokenizer('org/tiny', 'v1')):\n"
        "    try:\n        load()\n    except Refused as refused:\n        print(refused)\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    data, tokenizer = done.stdout.strip().splitlines()
    assert data.startswith("refused: data.path: no file or folder org/rows here, and the Hub can't be reached")
    assert tokenizer.startswith(
        "refused: model.name_or_path: the Hub can't be reached, and the tokenizer of org/tiny at"
    )
