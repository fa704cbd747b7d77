"""Places on this machine and Hub ids are told apart by name, and a wrong one is named with what was meant."""

import os
import subprocess
import sys

import pytest

from tunebook.system.places import check_data_path, check_model_path, is_local, is_local_data, list_data_files

ROW = '{"instruction": "a", "output": "b"}\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def only(problems):
    assert len(problems) == 1, problems
    return problems[0].render()


@pytest.mark.parametrize("name", ["/nonexistent/tiny", "./tinyy", "../tiny", "~/tiny", "a/b/c", ".", ".."])
def test_a_name_like_a_path_is_local(folder, name):
    assert is_local(name)


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen2.5-7B", "tatsu-lab/alpaca", "org/data.v1.5"])
def test_a_name_like_a_hub_id_is_not_local(folder, name):
    assert not is_local(name)
    assert check_model_path(name) == []
    assert check_data_path(name) == []


def test_an_existing_folder_with_the_form_of_a_hub_id_is_local(folder):
    (folder / "org" / "name").mkdir(parents=True)
    (folder / "org" / "name" / "config.json").write_text("{}")
    (folder / "org" / "name" / "rows.jsonl").write_text(ROW)
    assert is_local("org/name")
    assert check_model_path("org/name") == []
    assert [file.name for file in list_data_files("org/name").files] == ["config.json", "rows.jsonl"]


@pytest.mark.parametrize("path", ["/nonexistent/tiny", "./tinyy"])
def test_a_missing_model_folder_is_named(folder, path):  # case Y15
    text = only(check_model_path(path))
    assert f"folder {path} does not exist" in text
    assert text.startswith("model.name_or_path")


def test_the_nearest_name_is_given(folder):
    (folder / "tiny").mkdir()
    (folder / "alpaca.jsonl").write_text(ROW)
    assert "is tiny" in only(check_model_path("./tinyy"))
    assert "is alpaca.jsonl" in only(check_data_path("alpacca.jsonl"))
    assert "is tiny" in only(check_data_path("./tinny/rows/a.jsonl"))


def test_a_model_folder_without_a_config_is_refused(folder):  # case Y15
    (folder / "bare").mkdir()
    assert "no config.json in ./bare. It holds nothing" in only(check_model_path("./bare"))
    (folder / "bare" / "adapter_config.json").write_text("{}")
    assert "is an adapter" in only(check_model_path("./bare"))


def test_a_model_that_is_a_file_is_refused(folder):
    (folder / "model.gguf").write_text("x")
    assert "is a file" in only(check_model_path("./model.gguf"))


@pytest.mark.parametrize("name", ["no spaces", "a//b", "-x/y", "org/name.git", "a--b"])
def test_a_name_that_is_neither_path_nor_hub_id_is_refused(folder, name):
    assert only(check_model_path(name))
    assert only(check_data_path(name))


@pytest.mark.parametrize("path", ["rows.jsonl", "rows.json", "org/rows.parquet", "./rows", "a/b/rows", "rows.csv"])
def test_a_missing_data_file_never_becomes_a_hub_id(folder, path):
    assert is_local_data(path)
    assert f"{path} does not exist" in only(check_data_path(path))


@pytest.mark.parametrize("name", ["rows.tsv", "rows.txt", "rows.parquet.gz", "rows.jsonl.bz2", "rows"])
def test_a_file_of_another_kind_is_refused_with_the_kinds_that_are_read(folder, name):
    (folder / name).write_text("instruction;input;output\na;;b\n")
    assert ".json, .jsonl, .csv, .parquet or .arrow" in only(check_data_path(f"./{name}"))


def test_an_empty_file_is_refused_before_anything_loads(folder):  # case S03
    (folder / "data.jsonl").touch()
    assert "no rows in data.jsonl" in only(check_data_path("data.jsonl"))


def test_a_folder_gives_its_data_files_by_name_and_names_the_rest(folder):
    for name in ["b.jsonl", "a.json", "c.PARQUET", ".hidden.jsonl", "README.md"]:
        (folder / name).write_text("[]")
    (folder / "more").mkdir()
    listing = list_data_files(".")
    assert [file.name for file in listing.files] == ["a.json", "b.jsonl", "c.PARQUET"]
    assert len(listing.notes) == 1
    assert listing.notes[0].endswith("README.md, more/")
    assert check_data_path(".") == []


def test_compressed_files_are_data_and_a_saved_data_set_is_its_arrow_files(folder):
    for name in ["a.jsonl.gz", "b.json.zst", "c.csv", "d.arrow", "dataset_info.json", "state.json"]:
        (folder / name).write_text("x")
    assert [file.name for file in list_data_files(".").files] == ["a.jsonl.gz", "b.json.zst", "c.csv", "d.arrow"]
    assert list_data_files(".").notes == ()


def test_a_pattern_gives_the_files_that_it_matches(folder):
    (folder / "more").mkdir()
    for name in ["b.jsonl", "a.jsonl", "c.json", "more/d.jsonl", ".e.jsonl"]:
        (folder / name).write_text(ROW)
    assert [str(file) for file in list_data_files("*.jsonl").files] == ["a.jsonl", "b.jsonl"]
    assert [str(file) for file in list_data_files("**/[ad].jsonl").files] == ["a.jsonl", "more/d.jsonl"]
    assert list_data_files(f"{folder}/?.json").files == (folder / "c.json",)
    assert check_data_path("*.jsonl") == []
    assert "no file matches *.parquet" in only(check_data_path("*.parquet"))
    (folder / "[odd].jsonl").write_text(ROW)
    assert [str(file) for file in list_data_files("[odd].jsonl").files] == ["[odd].jsonl"]
    (folder / "d.txt").write_text(ROW)
    assert ".txt is not read" in only(check_data_path("d*"))


def test_a_folder_without_data_files_says_what_it_holds(folder):
    (folder / "rows").mkdir()
    (folder / "rows" / "data").mkdir()
    assert "it holds data/" in only(check_data_path("rows"))


def test_every_bad_file_of_a_folder_is_reported(folder):
    (folder / "a.jsonl").touch()
    (folder / "b.jsonl").touch()
    assert len(check_data_path(".")) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_refused(folder):
    (folder / "data.jsonl").write_text(ROW)
    (folder / "data.jsonl").chmod(0)
    assert "permission denied" in only(check_data_path("data.jsonl"))


def test_looking_at_places_imports_nothing_heavy():
    code = "import sys, tunebook.system.places; print(*(name for name in ('torch', 'datasets', 'transformers', 'huggingface_hub') if name in sys.modules))"  # noqa: E501
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


def test_a_name_with_an_owner_that_is_a_folder_here_is_taken_for_a_typo_only_beside_a_near_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "assets" / "tiny-qwen2").mkdir(parents=True)
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "quickstart.jsonl").write_text("{}")
    [problem] = check_model_path("assets/tiny-qwen")
    assert "does not exist" in problem.message and "tiny-qwen2" in problem.fix
    [problem] = check_data_path("data/quickstart.json1")
    assert "quickstart.jsonl" in problem.fix
    assert check_model_path("Qwen/Qwen2.5-7B") == check_data_path("data/alpaca") == []
