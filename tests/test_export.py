"""What is exported: others load it as it is, its card is true, and nothing of this machine is in it."""

import getpass
import json
import re
import shutil
import socket
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, pipeline

from broken_off import adapter_of, largest_difference
from finished_runs import finished_place, train_in
from tiny_data import CASES
from tunebook.card.code import QUESTION
from tunebook.commands.cli import main
from tunebook.data.conversation import pair
from tunebook.data.tokens import TurnEncoder
from tunebook.errors import Refused
from tunebook.export.export import export
from tunebook.export.finished import open_finished
from tunebook.system.quiet import quiet_libraries
from tunebook.training.summary import RunSummary
from tunebook.using.trained import load_trained

pytestmark = pytest.mark.slow
IDS = torch.arange(40, 72).reshape(2, 16)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A copy of the finished run; beside it two more runs on a base with a public name, of its own stop token."""
    return shutil.copytree(finished_place(), tmp_path_factory.mktemp("export") / "place")


@pytest.fixture(scope="module")
def x03(place):
    """A run on a base that is loaded from a folder and has a public name (case X03), trained until it knows its rows.

    Its answers end with <|im_end|>, at which the base itself does not stop: the usual case of a base model.
    """
    words = [f"model.name_or_path={place / 'base'}", "model.base_id=org/tiny", "data.template=auto"]
    words += [
        f"data.path={CASES / 'X03' / 'data.jsonl'}",
        "data.validation=0",
        "data.answer_rows=null",
        "lora.target_modules=all-linear",
    ]
    words += ["training.global_batch_size=2", "training.num_train_epochs=40", "training.learning_rate=1e-2"]
    words += ["training.logging_steps=20", "training.save_steps=40", "lora.r=8"]
    life = train_in(place, "--run-dir", str(place / "runs" / "x03"), *words)
    assert life.rank_codes() == [0], life.output()[-3000:]
    return life.output()


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    monkeypatch.chdir(place)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def difference(one, other):
    return float((logits(one) - logits(other)).abs().max())


def code_blocks(card):
    return re.findall(r"```python\n(.*?)```", card, flags=re.S)


def check_nothing_of_this_machine(folder, *places):
    """Look for places, users and machines in every byte of every file."""
    words = [str(Path.home()), str(Path.cwd()), "/tmp/", *map(str, places), "hf_secret"]
    words += [name for name in (socket.gethostname(), getpass.getuser()) if len(name) > 4]
    texts = [path for path in folder.iterdir() if path.suffix in (".json", ".md", ".jinja", ".yaml")]
    assert {"README.md", "adapter_config.json"} <= {path.name for path in texts}
    for path in folder.iterdir():
        content = path.read_bytes()
        found = [word for word in words if word.encode() in content]
        assert not found, (path.name, found)


def test_the_runs_own_adapter_folder_is_ready_to_give_away(place, tmp_path):
    done = export("runs/recipe", str(tmp_path / "out"))
    assert done.source == Path("runs/recipe/adapter") and done.is_new
    [note] = done.notes
    assert note.startswith("the adapter names its base base, which others do not have")
    for path in (place / "runs" / "recipe" / "adapter").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    assert {"README.md", "loss.png", "chat_template.jinja", "generation_config.json"} <= {
        path.name for path in done.folder.iterdir()
    }
    check_nothing_of_this_machine(done.folder)
    config = json.loads((done.folder / "tokenizer_config.json").read_text())
    assert not {"is_local", "local_files_only", "name_or_path"} & config.keys()


def test_it_is_loaded_in_three_ways_and_gives_the_runs_logits(place):
    """The base is named `base` here, and found as a folder, as it would be on the Hub by its name."""
    adapter = place / "runs" / "recipe" / "adapter"
    with quiet_libraries():
        trained = load_trained(open_finished("runs/recipe")).model
        onto_base = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), adapter)
        by_itself = AutoPeftModelForCausalLM.from_pretrained(adapter)
        ask = pipeline("text-generation", model=str(adapter))
    assert difference(trained, AutoModelForCausalLM.from_pretrained("base")) > 1e-3
    assert [difference(trained, one) for one in (onto_base, by_itself, ask.model)] == [0, 0, 0]
    stops = json.loads((adapter / "generation_config.json").read_text())["eos_token_id"]
    assert ask.model.generation_config.eos_token_id in stops


def test_a_checkpoint_is_exported_with_its_own_weights_and_figures(place, tmp_path, capsys):
    out = tmp_path / "out"
    assert run_command("export", "runs/recipe/checkpoints/checkpoint-4", "--out", str(out)) == 0
    printed = capsys.readouterr().out
    assert "source: runs/recipe/checkpoints/checkpoint-4\n" in printed and f"export: {out}\n" in printed
    weights = load_file(out / "adapter_model.safetensors")
    assert largest_difference(weights, load_file("runs/recipe/checkpoints/checkpoint-4/adapter_model.safetensors")) == 0
    assert largest_difference(weights, adapter_of(place / "runs" / "recipe")) > 1e-4
    with quiet_libraries():
        bare = AutoModelForCausalLM.from_pretrained("base")
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), out)
    assert difference(bare, loaded) > 0
    card = (out / "README.md").read_text()
    assert "after step 4, not those of the run's end" in card and "| optimizer steps | 4 |" in card
    losses = {event["step"]: event["loss"] for event in events(place) if "loss" in event}
    assert f"| {losses[1]:.4f} | {losses[4]:.4f} |" in card
    check_nothing_of_this_machine(out)


def test_a_checkpoint_of_an_interrupted_run_is_exported_too(place, tmp_path):
    whole = export("runs/recipe/checkpoints/checkpoint-4", str(tmp_path / "whole")).folder
    moved = shutil.copytree(place / "runs" / "recipe", tmp_path / "moved")
    shutil.rmtree(moved / "adapter")
    summary = json.loads((moved / "run_summary.json").read_text())
    measured = {field.name: field.default for field in fields(RunSummary) if field.default is not MISSING}
    told = {**summary, **measured, "status": "interrupted", "exit_code": 75}
    (moved / "run_summary.json").write_text(json.dumps(told))
    with pytest.raises(Refused, match=r"interrupted.*such as .*checkpoint-9"):
        export(str(moved), str(tmp_path / "out"))
    out = export(str(moved / "checkpoints" / "checkpoint-4"), str(tmp_path / "out")).folder
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in whole.iterdir()
    }


def events(place):
    return [json.loads(line) for line in (place / "runs" / "recipe" / "metrics.jsonl").read_text().splitlines()]


def run_command(*words):
    import sys

    before, sys.argv = sys.argv, ["tunebook", *words]
    try:
        main()
    except SystemExit as ended:
        return ended.code
    finally:
        sys.argv = before


def test_exporting_again_is_harmless_and_anything_else_there_is_refused(place, tmp_path, capsys):
    out = tmp_path / "out"
    assert export("runs/recipe", str(out)).is_new
    assert not export("runs/recipe", str(out)).is_new
    assert run_command("export", "runs/recipe/checkpoints/checkpoint-2", "--out", str(out)) == 2
    assert "holds something else than this export" in capsys.readouterr().err
    (out / "mine.txt").write_text("kept")
    with pytest.raises(Refused, match="holds something else"):
        export("runs/recipe", str(out))
    assert (out / "mine.txt").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"], "nothing is left beside it"


@pytest.mark.parametrize("inside", ["adapter", ".", "checkpoints/checkpoint-4", "new", "adapter/new"])
def test_no_target_lies_in_a_run_folder(place, inside):
    before = sorted(str(path) for path in place.rglob("*"))
    with pytest.raises(Refused, match="lies in the run folder"):
        export("runs/recipe", f"runs/recipe/{inside}")
    assert sorted(str(path) for path in place.rglob("*")) == before


def test_folders_of_templates_go_along_and_what_an_upload_left_does_not(place, tmp_path):
    moved = shutil.copytree(place / "runs" / "recipe", tmp_path / "moved")
    (moved / "adapter" / "additional_chat_templates").mkdir()
    (moved / "adapter" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    (moved / "adapter" / ".cache").mkdir()
    out = tmp_path / "out"
    assert export(str(moved), str(out)).is_new and not export(str(moved), str(out)).is_new
    assert (out / "additional_chat_templates" / "tool_use.jinja").is_file() and not (out / ".cache").exists()
    (out / "additional_chat_templates" / "tool_use.jinja").write_text("another")
    with pytest.raises(Refused, match="something else"):
        export(str(moved), str(out))


def test_a_run_without_what_the_card_is_made_of_is_refused(place, tmp_path):
    moved = shutil.copytree(place / "runs" / "recipe", tmp_path / "moved")
    summary = json.loads((moved / "run_summary.json").read_text())
    (moved / "run_summary.json").write_text(json.dumps({key: summary[key] for key in summary if key != "template"}))
    with pytest.raises(Refused, match=r"lacks 'template': this run is of another version"):
        export(str(moved), str(tmp_path / "out"))
    (moved / "plan.json").unlink()
    with pytest.raises(Refused, match=r"plan\.json: cannot be read"):
        export(str(moved), str(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moved"]


def test_what_is_no_source_or_no_target_is_refused(place, tmp_path, monkeypatch, capsys):
    assert run_command("export", "base") == 2
    assert "no run_summary.json" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="is a file"):
        export("runs/recipe", str(tmp_path / "file"))
    with pytest.raises(Refused, match=r"could not be saved.*MiB are free"):
        export("runs/recipe", str(tmp_path / "file" / "below"))

    def full_disk(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tunebook.export.export.put_in_place", full_disk)
    with pytest.raises(Refused, match="No space left"):
        export("runs/recipe", str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left"


def test_case_x03_no_exported_file_knows_where_the_base_was(place, x03, tmp_path):
    expected = json.loads((CASES / "X03" / "expect.json").read_text())["expect"]
    for source in ("runs/x03", "runs/x03/checkpoints/checkpoint-40"):
        folder = export(source, str(tmp_path / Path(source).name)).folder
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == expected["base_model_name_or_path"]
        check_nothing_of_this_machine(folder, place)
    check_nothing_of_this_machine(place / "runs" / "x03" / "adapter", place)
    card = ModelCard.load(place / "runs" / "x03" / "README.md")
    assert card.data.base_model == "org/tiny" and "path: data.jsonl" in card.text
    assert str(place) not in str(card)


def test_a_base_without_a_public_name_is_said_and_its_place_kept_back(place, x03, tmp_path, capsys):
    moved = shutil.copytree(place / "runs" / "x03", tmp_path / "unnamed")
    for name in ("run_summary.json", "x03.yaml", "recipe.yaml"):
        if (moved / name).is_file():
            text = (moved / name).read_text()
            text = text.replace('"public_base": "org/tiny"', '"public_base": null').replace("  base_id: org/tiny\n", "")
            (moved / name).write_text(text)
    config = json.loads((moved / "adapter" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(place / "base")
    (moved / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    assert run_command("export", str(moved), "--out", str(tmp_path / "out")) == 0
    assert "note: the adapter names its base ./base, which others do not have" in capsys.readouterr().out
    check_nothing_of_this_machine(tmp_path / "out", place, moved)
    assert "base_model" not in ModelCard.load(tmp_path / "out" / "README.md").data.to_dict()


def test_the_code_on_the_card_loads_the_run_and_its_answer_stops(place, x03, tmp_path, monkeypatch, capsys):
    assert "note: the base itself does not stop at <|im_end|>" in x03
    # By the name of the base as it would be found on the Hub.
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "tiny").symlink_to(place / "base")
    shutil.copytree(place / "runs" / "x03" / "adapter", tmp_path / "adapter")
    trained = load_trained(open_finished("runs/x03"))
    monkeypatch.chdir(tmp_path)
    loading, asking = code_blocks((tmp_path / "adapter" / "README.md").read_text())
    assert QUESTION in asking
    given = {}
    with quiet_libraries():
        exec(loading.replace('"."', '"adapter"'), given)
    assert difference(trained.model, given["model"]) == 0
    capsys.readouterr()
    exec(asking.replace(QUESTION, "Name a color."), given)
    assert capsys.readouterr().out == "red\n"
    [turns] = trained.prompts.render([pair("Name a color.", "-")])
    encoded = TurnEncoder(trained.tokenizer, trained.prompts).encode(turns)[0]
    assert given["inputs"]["input_ids"][0].tolist() == list(encoded.prompt_ids)
    with quiet_libraries():
        ask = pipeline("text-generation", model="adapter", tokenizer="adapter")
        assert ask.model.generation_config.eos_token_id == 0, "transformers reads them from the adapter: drop the note"
        settings = GenerationConfig.from_pretrained("adapter")
        messages = [{"role": "user", "content": "Name a color."}]
        [answer] = ask(messages, do_sample=False, max_new_tokens=8, generation_config=settings)
    assert answer["generated_text"][-1]["content"] == "red"
