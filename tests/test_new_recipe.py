"""`tunebook new`: the copy keeps every line but the model's, and says what was found of the model."""

import shlex
import shutil
from pathlib import Path

import pytest

from checkout import ROOT
from tunebook.commands.new_recipe import check_target, create_recipe, find_source, write_new
from tunebook.errors import Refused
from tunebook.recipe.copying import quoted, render_copy
from tunebook.recipe.reading import load_recipe
from tunebook.recipe.source import read_source

TITLE = "# mine"
SEVEN = ROOT / "recipes" / "qwen7b_qlora.yaml"
MINIMAL = "model:\n  name_or_path: a/b\ndata:\n  path: c/d\n"


def model_of(text: str, tmp_path: Path) -> dict:
    (tmp_path / "read.yaml").write_bytes(text.encode())
    source = read_source(str(tmp_path / "read.yaml"))
    assert not source.problems
    return source.values["model"]


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_copy_of_a_shipped_recipe_differs_in_two_lines(recipe, tmp_path):
    text = recipe.read_text(encoding="utf-8")
    before, after = text.splitlines(), render_copy(text, "org/other", TITLE).splitlines()
    assert len(before) == len(after)
    changed = [number for number, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    assert [after[number].strip().partition(" #")[0].rstrip() for number in changed] == [
        "# mine",
        "name_or_path: org/other",
    ]


def test_comments_behind_the_model_stay_in_their_column():
    text = "# Qwen2.5-7B\nmodel:\n  name_or_path: Qwen/Qwen2.5-7B   # why\ndata: {path: c/d}\n"
    short = render_copy(text, "a/b", TITLE).splitlines()[2]
    assert short.index("# why") == text.splitlines()[2].index("# why")
    long = render_copy(text, "organisation/a-model-with-a-long-name", TITLE).splitlines()[2]
    assert long == "  name_or_path: organisation/a-model-with-a-long-name   # why"


@pytest.mark.parametrize(
    "text",
    [
        MINIMAL,
        MINIMAL.replace("a/b", '"a/b"'),
        MINIMAL.replace("a/b", "'a/b' # that one"),
        MINIMAL.replace("\n", "\r\n"),
        "model: {name_or_path: a/b, revision: main, dtype: auto}\ndata: {path: c/d}",
        "data:\n  path: c/d\nmodel:\n  revision: v1   # that one\n  dtype: auto\n  base_id: e/f\n  name_or_path: a/b",
        "\ufeff# titled \U0001f917\nmodel:\n  name_or_path: a/b\ndata:\n  path: c/d\n".removeprefix("\ufeff"),
        "model:\n  name_or_path:\n    a/b\n  dtype: auto\ndata:\n  path: c/d\n",
        "model:\n  name_or_path: >-\n    a/b\n  revision: |-\n    v1\n  dtype: auto\ndata:\n  path: c/d\n",
        "model:\n  dtype: auto\n  base_id: >-\n\n    e/f\n\n  name_or_path: &it |-\n    a/b\ndata: {path: c/d}",
        "model:\n  name_or_path: 'a/\\\n    b'\n  dtype: auto\ndata:\n  path: c/d\n".replace("'", '"'),
        "model:\n  ? name_or_path\n  : a/b\n  ? revision\n  : !!str v1\n  ? dtype\n  : auto\ndata:\n  path: c/d\n",
        '{"model": {"name_or_path": "a/b", "dtype": "auto"}, "data": {"path": "c/d"}}',
    ],
)
@pytest.mark.parametrize("model", ["org/other", "./here", "~/models/x", "/a b/c: d#e", "123", "no", 'quote"d', "ä/ö"])
def test_however_it_is_written_the_copy_reads_as_meant(text, model, tmp_path):
    copied = render_copy(text, model, TITLE)
    assert copied.startswith("# mine\r\n" if "\r\n" in text else "# mine\n")
    read = model_of(copied, tmp_path)
    assert read["name_or_path"] == model
    assert not read.get("revision") and not read.get("base_id")
    assert ("dtype" in read) == ("dtype" in text)
    assert ("\r\n" in copied) == ("\r\n" in text)


def test_what_stands_around_a_folded_name_stays():
    text = "# Hardware: none\nmodel:\n  # this\n  name_or_path: >- # why\n    a/b\n\n  # type\n  dtype: auto\n"
    assert render_copy(text, "org/m", TITLE) == (
        "# mine\nmodel:\n  # this\n  name_or_path: org/m  # why\n\n  # type\n  dtype: auto\n"
    )


@pytest.mark.parametrize(
    ("top", "kept"),
    [
        ("# yaml-language-server: $schema=b-1/x.json\n", True),  # says what the model's name is in, and is no title
        ("# Copyright of somebody\n", True),
        ("# rank from the paper\n# second line\n\n", True),
        ("# b-1 on our data\n", False),
        ("# Anything. Hardware: 1 x 24 GB GPU\n", False),
        ("# org/b-1, copied from qwen7b_qlora.yaml.\n", False),
    ],
)
def test_only_a_title_gives_way_to_the_title(top, kept):
    text = "model:\n  name_or_path: a/b-1\n"
    expected = f"{TITLE}\n{top if kept else ''}{text.replace('a/b-1', 'org/m')}"
    assert render_copy(f"{top}{text}", "org/m", TITLE) == expected


def test_a_title_below_the_schema_gives_way():
    text = (
        "# yaml-language-server: $schema=x.json\n# b on one. Hardware: 1 x 8 GB GPU\n# more\nmodel: {name_or_path: a/b}"
    )
    assert render_copy(text, "c/d", TITLE) == (
        "# yaml-language-server: $schema=x.json\n# mine\n# more\nmodel: {name_or_path: c/d}"
    )


@pytest.mark.parametrize(
    "model", ["", "model: a/b\n", "model: null\n", "model: {dtype: auto}\n", "model: {name_or_path: }\n",
              "model: {name_or_path: [a/b]}\n", "model: [name_or_path]\n", "model:\n  name_or_path: ''\n"],
)  # fmt: skip
def test_a_recipe_without_a_model_is_not_copied(model, tmp_path):
    source = tmp_path / "source.yaml"
    source.write_text(f"{model}data:\n  path: c/d\n")
    with pytest.raises(Refused, match=r"source\.yaml.*(names no model|the section|a section)"):
        create_recipe(str(tmp_path / "mine.yaml"), str(source), "org/m")
    with pytest.raises(Refused, match="names no model"):
        render_copy(source.read_text(), "org/m", TITLE)
    assert not (tmp_path / "mine.yaml").exists()


def test_what_cannot_be_copied_is_refused_by_its_line():
    text = "data: {path: c/d}\nmodel:\n  dtype: auto\n  name_or_path: a/b\n  revision: v1  # one,\n"
    text = text.replace("\n  revision: v1", "\n  base_id: x\n  revision: {a: 1,\n b: 2}")
    assert "revision" not in render_copy(text, "org/m", TITLE, "s.yaml")
    joined = "model: {\n  dtype: auto, name_or_path: a/b }\ndata: {path: c/d}\n"
    assert model_names(render_copy(joined, "org/m", TITLE)) == ["dtype", "name_or_path"]
    spaced = "? model\n: ? revision\n  : v1\n  ? name_or_path\n  : a/b\n"
    with pytest.raises(Refused, match=r"s\.yaml:5: model.name_or_path: is written in a way"):
        render_copy(spaced, "org/m", TITLE, "s.yaml")


def model_names(text):
    from ruamel.yaml import YAML

    return list(YAML(typ="safe").load(text)["model"])


def test_quotes_stand_only_where_they_are_needed():
    assert [quoted(name) for name in ("a/b-1.5", "./x", "null", "0x1", "a b")] == [
        "a/b-1.5", "./x", '"null"', '"0x1"', '"a b"',
    ]  # fmt: skip


def test_a_source_is_a_name_or_a_path(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in ("qwen7b_qlora", "qwen7b_qlora.yaml", "recipes/qwen7b_qlora.yaml", str(SEVEN)):
        assert find_source(name).samefile(SEVEN)
    with pytest.raises(Refused, match=r"--from: no recipe qwen7b_qlor, .*Nearest: qwen7b_qlora"):
        find_source("qwen7b_qlor")
    for name in ("", "x" * 300, "~nobody-of-this-name/x"):
        with pytest.raises(Refused, match=r"--from: (names no recipe\. Recipes here: \w|no recipe )"):
            find_source(name)


def test_nothing_is_overwritten_and_no_folder_is_made(tmp_path):
    (tmp_path / "there.yaml").write_text("mine")
    (tmp_path / "link.yaml").symlink_to(tmp_path / "gone.yaml")
    for name, said in (
        ("there.yaml", "is there already"),
        ("link.yaml", "is there already"),
        ("mine.txt", "a recipe ends in"),
        ("new one/mine.yaml", r"there is no folder .*mkdir -p '.*new one'"),
        ("x" * 300 + ".yaml", "cannot be written: File name too long"),
        ("there.yaml/mine.yaml", "there is no folder"),
        ("line\nbreak.yaml", "is no name of a file"),
        ("bytes\udcff.yaml", "is no name of a file"),
    ):
        with pytest.raises(Refused, match=said):
            check_target(str(tmp_path / name))
    for name in ("", ".", "/", "./"):
        with pytest.raises(Refused, match=r"tunebook new: .* is no name of a file"):
            check_target(name)
    with pytest.raises(Refused, match="a recipe ends in"):
        check_target("..")
    with pytest.raises(Refused, match="is there already"):  # another process was faster
        write_new(tmp_path / "there.yaml", MINIMAL, "a/b")
    assert (tmp_path / "there.yaml").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.yaml", "there.yaml"]


def test_what_is_written_reads_back(tmp_path):
    write_new(tmp_path / "mine.yaml", MINIMAL, "a/b")
    assert load_recipe(str(tmp_path / "mine.yaml")).model.name_or_path == "a/b"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


@pytest.mark.slow
class TestLooking:
    @pytest.fixture(autouse=True)
    def checkout(self, monkeypatch, tmp_path):
        monkeypatch.chdir(ROOT)
        self.target = tmp_path / "mine.yaml"

    def created(self, capsys, model, source="qwen7b_qlora") -> str:
        create_recipe(str(self.target), source, str(model))
        return capsys.readouterr().out

    def test_what_is_to_be_typed_can_be(self, capsys, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        self.target = self.target.with_name("my recipe #1.yaml")
        said = self.created(capsys, "nobody/has-this")
        [plan, launch] = [line for line in said.splitlines() if "finetune.py" in line]
        assert str(self.target) in shlex.split(plan, comments=True)
        assert str(self.target) in shlex.split(launch, comments=True)

    @pytest.mark.parametrize(
        ("name", "told"),
        [
            ("Phi-4", ["Phi3ForCausalLM", "down_proj, gate_up_proj, o_proj, qkv_proj", "not tied", "<|im_end|>"]),
            ("Gemma-2-9B", ["Gemma2ForCausalLM", "embeddings tied", "attention  eager", "<end_of_turn>"]),
            (
                "Llama-3.1-8B",
                ["LlamaForCausalLM", "alpaca text", "<|endoftext|>", "a stand-in: it has none of its own"],
            ),
        ],
    )
    def test_a_local_model_is_looked_at(self, capsys, tmp_path, name, told):
        from architectures import build_architecture

        said = self.created(capsys, build_architecture(name, tmp_path / name))
        assert all(part in said for part in told), said
        assert f"finetune.py {self.target}" in said and "--num_processes N" in said and "--plan" in said
        assert load_recipe(str(self.target)).model.name_or_path == str(tmp_path / name)

    def test_without_the_hub_the_recipe_is_written_and_known_facts_are_told(self, capsys, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        said = self.created(capsys, "Qwen/Qwen2.5-14B")
        assert "the Hub can't be reached" in said and "written all the same" in said
        assert "14,770,033,664 parameters" in said and "gate_proj" in said
        assert "GiB for 8 rows of 1,024 tokens" in said and "24 GiB: up to 8" in said and "16 GiB: up to 4" in said
        first = self.target.read_text(encoding="utf-8").splitlines()[0]
        assert first == "# Qwen/Qwen2.5-14B, copied from qwen7b_qlora.yaml. Hardware: 1 x 24 GB GPU, by its plan"
        assert self.target.exists()
        self.target.unlink()
        assert "targets" not in self.created(capsys, "nobody/has-this")

    def test_a_model_that_cannot_be_trained_is_refused_and_nothing_written(self, tmp_path):
        from architectures import build_architecture

        model = build_architecture("Qwen2.5-7B", tmp_path / "model")
        (model / "model.safetensors").unlink()
        with pytest.raises(Refused, match="no weights in"):
            create_recipe(str(self.target), "qwen7b_qlora", str(model))
        shutil.rmtree(model)
        with pytest.raises(Refused, match="does not exist"):
            create_recipe(str(self.target), "qwen7b_qlora", str(model))
        assert not self.target.exists()
