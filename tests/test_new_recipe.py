"""`tunebook new`: the copy keeps every line but the model's, and says what was found of the model."""

import shutil
from pathlib import Path

import pytest

from checkout import ROOT
from tunebook.errors import Refused
from tunebook.new_recipe import check_target, create_recipe, find_source, write_new
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
    text = "# t\nmodel:\n  name_or_path: Qwen/Qwen2.5-7B   # why\ndata: {path: c/d}\n"
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
    ],
)
@pytest.mark.parametrize("model", ["org/other", "./here", "~/models/x", "/a b/c: d#e", "123", "no", 'quote"d', "ä/ö"])
def test_however_it_is_written_the_copy_reads_as_meant(text, model, tmp_path):
    copied = render_copy(text, model, TITLE)
    assert copied.startswith("# mine\n")
    read = model_of(copied, tmp_path)
    assert read["name_or_path"] == model
    assert not read.get("revision") and not read.get("base_id")
    assert ("dtype" in read) == ("dtype" in text)
    assert ("\r\n" in copied) == ("\r\n" in text)


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


def test_nothing_is_overwritten_and_no_folder_is_made(tmp_path):
    (tmp_path / "there.yaml").write_text("mine")
    (tmp_path / "link.yaml").symlink_to(tmp_path / "gone.yaml")
    for name in ("there.yaml", "link.yaml"):
        with pytest.raises(Refused, match="is there already"):
            check_target(tmp_path / name)
    with pytest.raises(Refused, match="there is no folder"):
        check_target(tmp_path / "new" / "mine.yaml")
    with pytest.raises(Refused, match="a recipe ends in"):
        check_target(tmp_path / "mine.txt")
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
        assert "GiB for 4 rows of 1,024 tokens" in said and "24 GiB: up to 4" in said and "16 GiB: up to 1" in said
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
