"""A damaged adapter is told from the trained one; and what the recipe says of the base later on counts everywhere."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from finished_runs import finished_place
from tunebook.commands import cli
from tunebook.errors import Refused
from tunebook.export.export import export
from tunebook.export.finished import open_finished

pytestmark = pytest.mark.slow
RUN = "runs/recipe"
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def place(tmp_path, monkeypatch):
    folder = shutil.copytree(finished_place(), tmp_path / "place", ignore=shutil.ignore_patterns("checkpoints"))
    monkeypatch.chdir(folder)
    return folder


def change_tensors(change):
    def damage(adapter):
        tensors = load_file(adapter / WEIGHTS)
        change(tensors)
        save_file(tensors, adapter / WEIGHTS)

    return damage


def change_config(**changes):
    def damage(adapter):
        path = adapter / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def put_nan(tensors):
    tensors[min(tensors)].view(-1)[3] = float("nan")


DAMAGES = {
    "a tensor less": (change_tensors(lambda tensors: tensors.pop(min(tensors))), "its tensors have the sha256"),
    "a tensor more": (change_tensors(lambda tensors: tensors.update(x=torch.zeros(2))), "its tensors have the sha256"),
    "a NaN": (change_tensors(put_nan), "its tensors have the sha256"),
    "another shape": (
        change_tensors(lambda tensors: tensors.update({min(tensors): tensors[min(tensors)][:2].clone()})),
        "its tensors have the sha256",
    ),
    "another type": (
        change_tensors(lambda tensors: tensors.update({name: one.half() for name, one in tensors.items()})),
        "its tensors have the sha256",
    ),
    "a part": (lambda adapter: (adapter / WEIGHTS).write_bytes((adapter / WEIGHTS).read_bytes()[:5000]), "be read"),
    "no bytes": (lambda adapter: (adapter / WEIGHTS).write_bytes(b""), "its weights cannot be read"),
    "no config": (lambda adapter: (adapter / "adapter_config.json").unlink(), "adapter_config.json is missing"),
    "half a config": (lambda adapter: (adapter / "adapter_config.json").write_text('{"r": '), "config.json cannot be"),
    "a list": (lambda adapter: (adapter / "adapter_config.json").write_text("[]"), "adapter_config.json cannot be"),
    "another scale": (change_config(lora_alpha=16), "adapter_config.json has lora_alpha 16, and the recipe 8"),
    "no settings": (lambda adapter: (adapter / "generation_config.json").unlink(), "generation_config.json is missing"),
    "no tokenizer": (lambda adapter: (adapter / "tokenizer.json").write_text(""), "tokenizer.json cannot be read"),
}
COMMANDS = {
    "chat": [],
    "generate": ["--prompts", "prompts.txt", "--out", "answers.jsonl"],
    "eval": ["--answer-rows", "0", "--no-before"],
    "export": ["--out", "out"],
    "merge": ["--out", "out"],
    "push": ["--repo", "me/x", "--dry-run"],
}


def run_command(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["tunebook", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def test_each_damage_is_found(place):
    adapter = open_finished(RUN).whole_adapter
    shutil.copytree(adapter, "whole")
    for name, (damage, reason) in DAMAGES.items():
        damage(adapter)
        with pytest.raises(Refused, match=r"adapter: is not what was trained") as refused:
            print(name, open_finished(RUN).whole_adapter)
        assert reason in str(refused.value) and "\n" not in str(refused.value), name
        shutil.rmtree(adapter)
        shutil.copytree("whole", adapter)
    assert open_finished(RUN).whole_adapter == adapter


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_refuses_it_and_leaves_nothing(place, monkeypatch, capsys, command):
    name_the_base()
    (place / "prompts.txt").write_text("hello\n")
    DAMAGES["a tensor less"][0](place / RUN / "adapter")
    before = sorted(place.rglob("*"))
    assert run_command(monkeypatch, command, RUN, *COMMANDS[command]) == 2
    said = capsys.readouterr().err
    assert said.startswith("refused: runs/recipe/adapter: is not what was trained: its tensors") and "Trace" not in said
    assert [path for path in sorted(place.rglob("*")) if "cache" not in path.parts] == [
        path for path in before if "cache" not in path.parts
    ]


def name_the_base():
    """Do what the refusal of a push says: write the public name of the base into the recipe of the run."""
    recipe = Path(RUN) / "recipe.yaml"
    text = recipe.read_text()
    assert "name_or_path: base\n" in text
    recipe.write_text(text.replace("name_or_path: base\n", "name_or_path: base\n  base_id: org/tiny\n"))


def test_a_name_that_the_recipe_gives_the_base_later_counts_everywhere(place, monkeypatch, capsys):
    assert run_command(monkeypatch, "push", RUN, "--repo", "me/x", "--dry-run") == 2
    assert "Write its owner/name as model.base_id into the recipe in the run folder" in capsys.readouterr().err
    before = {path: path.read_bytes() for path in Path(RUN).rglob("*") if path.is_file()}
    name_the_base()
    done = export(RUN, "out")
    assert not [note for note in done.notes if "base_id" in note]
    assert run_command(monkeypatch, "merge", RUN, "--out", "merged") == 0
    sent = []
    monkeypatch.setattr("tunebook.hub.publishing.find_leaks", lambda files, folder, token: sent.extend(files) or [])
    assert run_command(monkeypatch, "push", RUN, "--repo", "me/x", "--dry-run") == 0
    pushed = {file.name: file.content for file in sent}
    cards = [pushed["README.md"].decode(), Path("out/README.md").read_text(), Path("merged/README.md").read_text()]
    for card in cards:
        assert ModelCard(card).data.base_model == "org/tiny" and "known by the folder" not in card
    assert cards[0] == cards[1] and "AutoPeftModelForCausalLM" in cards[0]
    for config in (pushed["adapter_config.json"].decode(), Path("out/adapter_config.json").read_text()):
        assert json.loads(config)["base_model_name_or_path"] == "org/tiny"
    changed = [path.name for path, content in before.items() if path.read_bytes() != content]
    assert changed == ["recipe.yaml"], "a run is not written to"


def test_an_export_elsewhere_has_no_licence_of_a_stranger_and_needs_no_base(place, tmp_path, monkeypatch):
    (place / "base" / "README.md").write_text("---\nlicense: mit\n---\n")
    assert "published under mit" in (export(RUN, "out").folder / "README.md").read_text()
    (tmp_path / "else" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "else")
    for text in (None, "---\nlicense: gpl-3.0\n---\n"):
        if text:
            Path("base/README.md").write_text(text)
        card = (export(str(place / RUN), f"out{bool(text)}").folder / "README.md").read_text()
        assert "licence of the base is not known here" in card
    card = (export(str(place / RUN), "named", str(place / "base")).folder / "README.md").read_text()
    assert "published under mit" in card and str(place) not in card


def test_the_end_is_exported_with_the_note_on_where_the_base_stops(place):
    settings = Path("base/generation_config.json")
    note = "the base itself does not stop at"
    stop = open_finished(RUN).summary["stop_token_id"]
    for stops, is_noted in (([stop, 5], False), (stop, False), (5, True), ([5], True)):
        settings.write_text(json.dumps({"eos_token_id": stops}))
        notes = export(RUN, f"out-{stops}").notes
        assert any(one.startswith(note) for one in notes) == is_noted, stops


def test_a_run_of_another_version_is_refused_before_anything_is_merged(place, monkeypatch, capsys):
    path = Path(RUN) / "run_summary.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in told.items() if name != "method"}))
    assert run_command(monkeypatch, "merge", RUN, "--out", "merged") == 2
    printed = capsys.readouterr()
    assert "lacks 'method'" in printed.err and printed.out == "" and not Path("merged").exists()
