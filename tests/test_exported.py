"""The export of a checkpoint is what the run would have left had it ended there."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from broken_off import adapter_of, largest_difference
from finished_runs import finished_place, train_in
from tunebook.errors import Refused
from tunebook.export.export import export
from tunebook.export.exported import exported_folder
from tunebook.export.finished import open_finished
from tunebook.model.model import keep_4bit_weights
from tunebook.system.quiet import quiet_libraries
from tunebook.using.trained import load_trained

pytestmark = pytest.mark.slow
IDS = torch.arange(40, 72).reshape(2, 16)
# Saved after the last step, so that the export of that checkpoint must be the run's own adapter.
LAST = ("training.max_steps=3", "training.num_train_epochs=null", "training.save_steps=3", "data.answer_rows=0")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return shutil.copytree(finished_place(), tmp_path_factory.mktemp("exported") / "place")


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    monkeypatch.chdir(place)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def test_a_checkpoint_has_its_own_weights_and_all_else_of_the_run(place, tmp_path):
    finished = open_finished("runs/recipe/checkpoints/checkpoint-4")
    out = tmp_path / "out"
    with exported_folder(finished) as folder:
        shutil.copytree(folder, out)
    weights = "adapter_model.safetensors"
    assert (out / weights).read_bytes() == (finished.source / weights).read_bytes()
    assert largest_difference(load_file(out / weights), adapter_of(place / "runs" / "recipe")) > 1e-4
    ours, of_the_run = contents(out), contents(place / "runs" / "recipe" / "adapter")
    assert {name for name in of_the_run if of_the_run[name] != ours.get(name)} - {"README.md", "loss.png"} == {weights}
    with quiet_libraries():
        base = load_trained(open_finished("runs/recipe")).model.unload()
        loaded = PeftModel.from_pretrained(base, out)
    trained = load_trained(finished)
    assert (logits(loaded) - logits(trained.model)).abs().max() == 0
    assert trained.prompts.name == "alpaca text"


def test_another_tokenizer_of_the_same_base_is_refused(place, tmp_path):
    shutil.copytree(place, tmp_path / "place")
    config = tmp_path / "place" / "base" / "tokenizer.json"
    config.write_text(config.read_text().replace("<|im_end|>", "<|im_over|>"))
    with pytest.raises(Refused, match="has another tokenizer or template than the run had"):
        export("runs/recipe/checkpoints/checkpoint-4", str(tmp_path / "out"), str(tmp_path / "place" / "base"))
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*")), "nothing is left of it"


@pytest.mark.parametrize(
    "words",
    [
        ("lora.init_lora_weights=pissa", "lora.target_modules=all-linear"),
        pytest.param(
            ("lora.init_lora_weights=mica", "lora.use_rslora=true", "data.template=auto"), marks=pytest.mark.long
        ),
        ("lora.use_dora=true", "quantization={load_in_4bit: true}", "model.add_special_tokens=['<|tool|>']"),
        ("lora=null",),
    ],
    ids=["pissa", "mica", "dora-nf4-tokens", "whole-model"],
)
def test_the_last_checkpoint_of_each_kind_gives_what_the_run_gave(place, words):
    name = "-".join(words)[:30].replace("/", "")
    life = train_in(place, "--run-dir", f"runs/{name}", *LAST, *words)
    assert life.rank_codes() == [0], life.output()[-3000:]
    expected = contents(place / "runs" / name / "adapter")
    with exported_folder(open_finished(f"runs/{name}/checkpoints/checkpoint-3")) as folder:
        found = contents(folder)
    for one in ("README.md", "loss.png"):
        expected.pop(one, None)
    assert found.keys() == expected.keys()
    for file, content in expected.items():
        assert found[file] == content, file
    check_code_on_card(f"runs/{name}")
    if "lora=null" in words:
        check_damage_is_found(Path("runs") / name)


def check_damage_is_found(run):
    """A whole model has tied weights, and a hash of all of them, too."""
    path = run / "adapter" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(Refused, match="its tensors have the sha256"):
        load_trained(open_finished(str(run)))
    path.write_bytes(content[:5000])
    with pytest.raises(Refused, match="its weights cannot be read"):
        load_trained(open_finished(str(run)))


def check_code_on_card(run):
    """Run the code that the card shows for loading, and compare with the run's model."""
    folder = Path(run) / "adapter"
    [loading, _] = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), flags=re.S)
    given = {}
    with quiet_libraries():
        exec(loading.replace('"."', f'"{folder}"'), given)
    keep_4bit_weights(given["model"])
    assert (logits(given["model"]) - logits(load_trained(open_finished(run)).model)).abs().max() == 0
    assert given["model"].generation_config.eos_token_id[0] == open_finished(run).summary["stop_token_id"]
