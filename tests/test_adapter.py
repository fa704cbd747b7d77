"""What comes out: it loads, gives the same logits, is equal from run to run, and says what it belongs to."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, GenerationConfig

from tiny_training import NF4, STOP, build_base, build_data, build_recipe, plan_of
from tunebook.launching.world import World
from tunebook.model.adapter import adapter_tensors, tensor_sha256, write_adapter
from tunebook.model.model import build_model, keep_4bit_weights
from tunebook.system.quiet import quiet_libraries

pytestmark = pytest.mark.slow
IDS = torch.arange(40, 72).reshape(2, 16)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return build_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def tokenizer(base):
    return AutoTokenizer.from_pretrained(base)


def trained(recipe, tokenizer):
    """Return a model whose trainable weights have moved away from their start."""
    model = build_model(recipe, plan_of(recipe, World(), build_data(), "runs/tiny"), World(), tokenizer)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def fresh_base(base: Path, quantization):
    settings = BitsAndBytesConfig(**quantization, bnb_4bit_compute_dtype=torch.float32) if quantization else None
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=settings, dtype=torch.float32)
    keep_4bit_weights(model)
    return model


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("quantization", [None, NF4], ids=["plain", "nf4"])
@pytest.mark.parametrize(
    "lora",
    [
        {"r": 4},
        {"r": 4, "target_modules": ["v_proj", "q_proj"], "modules_to_save": ["lm_head"]},
        {"r": 4, "target_modules": ["q_proj", "embed_tokens"], "use_rslora": True},
        {"r": 4, "target_modules": r".*\.(gate|up)_proj", "use_dora": True},
    ],
    ids=["all-linear", "saved-head", "embedding", "pattern"],
)
def test_loaded_on_a_fresh_base_it_gives_the_same_logits(base, tokenizer, tmp_path, lora, quantization):
    recipe = build_recipe(base, lora=lora, quantization=quantization)
    model = trained(recipe, tokenizer)
    write_adapter(model, tokenizer, recipe, tmp_path / "adapter", STOP)
    with quiet_libraries():
        bare = logits(fresh_base(base, quantization))
        loaded = PeftModel.from_pretrained(fresh_base(base, quantization), tmp_path / "adapter")
    assert (logits(loaded) - logits(model)).abs().max() == 0
    assert (bare - logits(model)).abs().max() > 1e-3


def test_a_full_fine_tune_comes_out_whole(base, tokenizer, tmp_path):
    recipe = build_recipe(base, lora=None)
    model = trained(recipe, tokenizer)
    assert write_adapter(model, tokenizer, recipe, tmp_path / "model", STOP) == ()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert (logits(loaded) - logits(model)).abs().max() == 0


def test_two_writings_are_equal_byte_for_byte(base, tokenizer, tmp_path):
    recipe = build_recipe(base)
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        write_adapter(trained(recipe, tokenizer), tokenizer, recipe, folder, STOP)
    names = sorted(path.name for path in folders[0].iterdir())
    assert names == sorted(path.name for path in folders[1].iterdir())
    assert all((folders[0] / name).read_bytes() == (folders[1] / name).read_bytes() for name in names)
    assert "README.md" not in names, "peft's card says nothing"
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "chat_template.jinja"} <= set(names)


def test_targets_are_short_and_sorted(base, tokenizer, tmp_path):
    recipe = build_recipe(base)
    write_adapter(trained(recipe, tokenizer), tokenizer, recipe, tmp_path / "adapter", STOP)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    expected = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config["target_modules"] == expected
    assert config["inference_mode"] is True and config["task_type"] == "CAUSAL_LM"


def test_the_base_goes_by_its_public_name(base, tokenizer, tmp_path):
    recipe = build_recipe(base, model={"base_id": "someone/tiny", "revision": "v1"})
    notes = write_adapter(trained(recipe, tokenizer), tokenizer, recipe, tmp_path / "adapter", STOP)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"], notes) == ("someone/tiny", "v1", ())
    texts = [path for path in (tmp_path / "adapter").iterdir() if path.suffix in (".json", ".jinja", ".md")]
    assert not [path.name for path in texts if str(base.parent) in path.read_text()], "a local path got out"


def test_a_base_known_by_its_folder_alone_is_said(base, tokenizer, tmp_path):
    recipe = build_recipe(base)
    [note] = write_adapter(trained(recipe, tokenizer), tokenizer, recipe, tmp_path / "adapter", STOP)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base) and config["revision"] is None
    assert str(base) in note and "model.base_id" in note


def test_generation_stops_at_the_token_that_was_trained(base, tokenizer, tmp_path):
    odd = tmp_path / "odd"
    shutil.copytree(base, odd)
    # Settings that transformers loads from published models, and refuses to save.
    settings = {"do_sample": False, "temperature": 0.5, "eos_token_id": 3, "pad_token_id": 3}
    (odd / "generation_config.json").write_text(json.dumps(settings))
    recipe = build_recipe(odd)
    write_adapter(trained(recipe, tokenizer), tokenizer, recipe, tmp_path / "adapter", STOP)
    loaded = GenerationConfig.from_pretrained(tmp_path / "adapter")
    assert loaded.eos_token_id == [STOP, 3]
    assert loaded.pad_token_id == tokenizer.pad_token_id


def test_an_earlier_adapter_is_replaced_whole(base, tokenizer, tmp_path):
    recipe = build_recipe(base)
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "left_over.bin").write_bytes(b"old")
    write_adapter(trained(recipe, tokenizer), tokenizer, recipe, folder, STOP)
    assert not (folder / "left_over.bin").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"], "nothing is left beside it"


def test_a_writing_that_fails_leaves_the_earlier_adapter(base, tokenizer, tmp_path, monkeypatch):
    recipe = build_recipe(base)
    folder = tmp_path / "adapter"
    model = trained(recipe, tokenizer)
    write_adapter(model, tokenizer, recipe, folder, STOP)
    before = (folder / "adapter_model.safetensors").read_bytes()

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(tokenizer), "save_pretrained", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_adapter(model, tokenizer, recipe, folder, STOP)
    assert (folder / "adapter_model.safetensors").read_bytes() == before


def test_the_hash_is_of_names_types_shapes_and_numbers(base, tokenizer, tmp_path):
    recipe = build_recipe(base)
    model = trained(recipe, tokenizer)
    tensors = adapter_tensors(model)
    digest = tensor_sha256(tensors)
    assert tensor_sha256(dict(reversed(tensors.items()))) == digest
    write_adapter(model, tokenizer, recipe, tmp_path / "adapter", STOP)
    assert tensor_sha256(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == digest
    name = next(iter(tensors))
    changes = [tensors[name] + 1e-7, tensors[name].T.contiguous(), tensors[name].bfloat16()]
    digests = {tensor_sha256({**tensors, name: changed}) for changed in changes}
    digests |= {tensor_sha256({**tensors, "other": torch.zeros(1)})}
    assert len(digests | {digest}) == 5


def test_writing_says_nothing(base, tokenizer, tmp_path, capfd):
    for lora, name in (({"r": 4}, "adapter"), (None, "model")):
        recipe = build_recipe(base, lora=lora)
        write_adapter(trained(recipe, tokenizer), tokenizer, recipe, tmp_path / name, STOP)
    assert capfd.readouterr() == ("", "")
