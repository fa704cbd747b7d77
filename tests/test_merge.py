"""The merged model: what it must say, where it comes from, and that nothing stays of one that fails."""

import hashlib
import json
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from finished_runs import finished_place, train_in
from test_new_tokens import recipe_for
from tiny_data import CASES, SHARED
from tiny_models import build_tiny_model
from tunebook.data.prepare import prepare_data
from tunebook.data.tokenizer import tokenizer_of
from tunebook.errors import Refused
from tunebook.export.finished import Finished, open_finished
from tunebook.launching.process_group import process_group
from tunebook.launching.world import World
from tunebook.merge.computing import computed_in
from tunebook.merge.merge import merge
from tunebook.merge.merging import Scratch
from tunebook.plan.plan import build_plan, with_split
from tunebook.system.quiet import quiet_libraries
from tunebook.training.ready import build_run
from tunebook.training.run import train
from tunebook.using.trained import load_trained

pytestmark = pytest.mark.slow
IDS = torch.arange(40, 104).reshape(2, 32)
NF4 = [f"quantization.{key}={value}" for key, value in {"load_in_4bit": "true", "bnb_4bit_quant_type": "nf4"}.items()]


def logits(model, ids=IDS):
    with quiet_libraries(), torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits


def load(folder):
    with quiet_libraries():
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def adapter_on(base, adapter):
    """Return the adapter on the base, as a stranger loads it in the base's own type."""
    with quiet_libraries():
        return PeftModel.from_pretrained(load(base), adapter)


def hashes(folder):
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def figures(text):
    """Return the largest difference of each row of the printed table, by the row's first words."""
    rows = re.findall(r"^\| (the [^|]+?) \| ([^|]+) \|", text, flags=re.M)
    return {name: float(number) for name, number in rows}


@pytest.fixture
def place(monkeypatch):
    monkeypatch.chdir(finished_place())
    return finished_place()


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """Return the folder of a model of 128 wide, trained in NF4 on the rows of its case."""
    folder = tmp_path_factory.mktemp("quantised")
    build_tiny_model(folder / "base", hidden_size=128)
    shutil.copy(CASES / "X01" / "data.jsonl", folder / "rows.jsonl")
    (folder / "case.yaml").write_text("""
model: {name_or_path: base, base_id: someone/tiny, dtype: float32}
quantization: {load_in_4bit: true, bnb_4bit_quant_type: nf4}
lora: {r: 8, target_modules: [q_proj, v_proj, o_proj, down_proj]}
data: {path: rows.jsonl}
training: {global_batch_size: 2, per_device_train_batch_size: 2, learning_rate: 5e-2, num_train_epochs: 3}
""")
    life = train_in(folder, recipe="case.yaml")
    assert life.rank_codes() == [0], life.output()[-3000:]
    return folder


def test_the_adapter_of_a_4_bit_base_is_merged_unquantised(quantised, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(quantised)
    before = hashes(quantised)
    assert merge("runs/case", str(tmp_path / "merged")) == 0
    assert hashes(quantised) == before, "neither run nor base are written to"
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "float32"
    merged, expected = logits(load(tmp_path / "merged")), logits(adapter_on("base", "runs/case/adapter"))
    assert (merged - expected).abs().max() < 1e-4
    assert (merged - logits(load("base"))).abs().max() > 0.1
    printed = capsys.readouterr().out
    found = figures(printed)
    assert found["the merged model, read back from disk"] < 1e-5
    assert found["the adapter on the 4-bit base that it was trained on"] > 1e-3
    assert "4 fixed questions" in printed and "adapter: runs/case/adapter" in printed
    card = (tmp_path / "merged" / "README.md").read_text()
    assert re.search("^base_model: .?someone/tiny", card, flags=re.M)
    rows = [line for line in printed.splitlines() if line.startswith("| the")]
    assert len(rows) == 3 and all(row in card.partition("Merged and verified")[2] for row in rows)
    texts = [path.read_text() for path in (tmp_path / "merged").iterdir() if path.suffix in (".json", ".md", ".jinja")]
    assert len(texts) >= 5 and not any(str(quantised) in text or str(tmp_path) in text for text in texts)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_a_narrow_type_it_differs_by_rounding_alone(quantised, tmp_path, monkeypatch, capsys, dtype):
    monkeypatch.chdir(quantised)
    assert merge("runs/case", str(tmp_path / "merged"), dtype) == 0
    found = figures(capsys.readouterr().out)
    assert 0 < found["the merged model, read back from disk"] < 0.1 * found["the base without the adapter"]
    model = load(tmp_path / "merged")
    assert {weight.dtype for weight in model.parameters()} == {getattr(torch, dtype)}
    # Rounded once, from the exact sum.
    layer = "model.layers.0.self_attn.q_proj.weight"
    adapter = load_file("runs/case/adapter/adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    exact = (
        load_file("base/model.safetensors")[layer] + adapter[f"{name}.lora_B.weight"] @ adapter[f"{name}.lora_A.weight"]
    )
    assert torch.equal(model.state_dict()[layer], exact.to(getattr(torch, dtype)))


def test_each_source_gives_its_own_weights(place, tmp_path, capsys):
    sources = {"end": "runs/recipe", "earlier": "runs/recipe/checkpoints/checkpoint-4"}
    layer, name = "model.layers.1.self_attn.v_proj.weight", "base_model.model.model.layers.1.self_attn.v_proj"
    base, merged = load_file("base/model.safetensors")[layer], {}
    for source, run in sources.items():
        assert merge(run, str(tmp_path / source)) == 0
        folder = Path(run) / "adapter" if source == "end" else Path(run)
        assert f"adapter: {folder}\n" in capsys.readouterr().out
        adapter = load_file(folder / "adapter_model.safetensors")
        change = 2 * adapter[f"{name}.lora_B.weight"] @ adapter[f"{name}.lora_A.weight"]  # lora_alpha 8, r 4
        merged[source] = load_file(tmp_path / source / "model.safetensors")[layer]
        assert (merged[source] - base - change).abs().max() < 1e-5
        assert (merged[source] - base).abs().max() > 1e-4
    assert not torch.equal(merged["end"], merged["earlier"])
    assert "checkpoint" in (tmp_path / "earlier" / "README.md").read_text()
    with pytest.raises(Refused, match="is the folder of an adapter"):
        merge("runs/recipe", "runs/recipe/adapter")
    with pytest.raises(Refused, match="is not empty"):
        merge("runs/recipe", str(tmp_path / "end"))


def test_tokenizer_template_and_stop_token_come_with_it(place, tmp_path):
    assert merge("runs/recipe", str(tmp_path / "merged")) == 0
    settings = [GenerationConfig.from_pretrained(folder) for folder in (tmp_path / "merged", "runs/recipe/adapter")]
    assert settings[0].eos_token_id == settings[1].eos_token_id and settings[0].eos_token_id
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "merged", "runs/recipe/adapter")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    assert tokenizers[0].chat_template == tokenizers[1].chat_template


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merge_that_went_wrong_fails_and_leaves_nothing(place, tmp_path, monkeypatch, capsys, dtype):
    keep = Scratch.keep
    monkeypatch.setattr(Scratch, "keep", lambda self, tensor, name: keep(self, tensor * 1.2, name))
    assert merge("runs/recipe", str(tmp_path / "made" / "merged"), dtype) == 1
    printed = capsys.readouterr()
    assert "failed: the merged model's logits differ by" in printed.err and "Nothing was kept" in printed.err
    assert figures(printed.out)["the merged model, read back from disk"] > 1e-4
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_would_not_stop_fails(place, tmp_path, monkeypatch, capsys):
    def copy_others(source, target):
        target.write_text(json.dumps({"eos_token_id": [7]}))

    monkeypatch.setattr("tunebook.merge.saved_model.shutil.copyfile", copy_others)
    assert merge("runs/recipe", str(tmp_path / "merged")) == 1
    assert "failed: it stops at [7] instead of" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", [2_000, 100_000], ids=["a layer", "the model"])
def test_a_full_disk_leaves_nothing(place, tmp_path, capsys, limit):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        code = merge("runs/recipe", str(tmp_path / "merged"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1
    assert "could not be saved" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_base_that_is_published_quantised_is_refused(place, tmp_path, monkeypatch):
    shutil.copytree(place, tmp_path / "place", ignore=shutil.ignore_patterns("checkpoints"))
    monkeypatch.chdir(tmp_path / "place")
    config = json.loads(Path("base/config.json").read_text())
    Path("runs/recipe/identity.json").unlink()  # which tells that this is another base
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    Path("base/config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(Refused, match=r"published quantised \(gptq\).*never merged"):
        merge("runs/recipe", str(tmp_path / "merged"))
    assert not (tmp_path / "merged").exists()


def test_a_number_too_large_for_float16_is_refused(place, tmp_path, monkeypatch):
    keep = Scratch.keep
    monkeypatch.setattr(Scratch, "keep", lambda self, tensor, name: keep(self, tensor * 1e9, name))
    with pytest.raises(Refused, match=r"proj.weight has numbers that float16 cannot hold\. Use --dtype"):
        merge("runs/recipe", str(tmp_path / "merged"), "float16")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_no_number_is_no_matter_of_the_type(place, tmp_path, monkeypatch, dtype):
    keep = Scratch.keep
    monkeypatch.setattr(Scratch, "keep", lambda self, tensor, name: keep(self, tensor * float("nan"), name))
    with pytest.raises(Refused, match=r"proj.weight with the adapter in it is not a number everywhere") as refused:
        merge("runs/recipe", str(tmp_path / "merged"), dtype)
    assert "--dtype" not in str(refused.value) and list(tmp_path.iterdir()) == []


def test_a_base_whose_weights_do_not_fit_its_config_is_refused(tmp_path, monkeypatch):
    shutil.copytree(finished_place(), tmp_path / "place", ignore=shutil.ignore_patterns("checkpoints"))
    monkeypatch.chdir(tmp_path / "place")
    Path("runs/recipe/identity.json").unlink()  # else it would not be looked into
    config = json.loads(Path("base/config.json").read_text())
    Path("base/config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    with pytest.raises(
        Refused, match=r"base cannot be loaded: its weights have other shapes than its config\.json says"
    ):
        merge("runs/recipe", str(tmp_path / "merged"))
    shutil.rmtree("base")
    build_tiny_model(Path("base"), hidden_size=128)  # sound in itself, and none for this adapter
    with pytest.raises(Refused, match=r"adapter: does not fit the base: .*size mismatch"):
        merge("runs/recipe", str(tmp_path / "merged"))
    with quiet_libraries(), pytest.raises(Refused, match=r"adapter: does not fit the base: .*size mismatch"):
        load_trained(open_finished("runs/recipe"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_computes_in_another_type_and_keeps_its_own(place, dtype):
    held, other = adapter_on("base", "runs/recipe/adapter"), adapter_on("base", "runs/recipe/adapter").to(dtype)
    before = {name: (value.dtype, value.data_ptr()) for name, value in held.named_parameters()}
    with computed_in(held, dtype):
        found = logits(held)
        with pytest.raises(IndexError):
            logits(held, IDS + 1000)
    assert found.dtype == dtype and (found - logits(other)).abs().max() < 1e-2 * (dtype == torch.bfloat16) + 1e-6
    assert before == {name: (value.dtype, value.data_ptr()) for name, value in held.named_parameters()}
    assert logits(held).dtype == torch.float32


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_added_tokens_are_in_the_merged_model(tmp_path, monkeypatch, tied):
    recipe = recipe_for(build_tiny_model(tmp_path / "base", tied=tied), tmp_path)
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    tokenizer = tokenizer_of(recipe)
    data = prepare_data(recipe, tokenizer)
    plan = build_plan(recipe, World(), run_dir=str(tmp_path / "run"))
    with process_group(World()):
        planned = with_split(plan, data.num_train_rows, data.num_eval_rows, {})
        live = train(build_run(recipe, planned, World(), tokenizer, data)).run.model
    finished = Finished(tmp_path / "run", recipe, {}, plan)
    monkeypatch.setattr("tunebook.merge.merge.open_finished", lambda *given: finished)
    monkeypatch.setattr("tunebook.merge.merge._write_card", lambda *given: None)  # of a run without a plan
    monkeypatch.setattr("tunebook.merge.merge.card_facts", lambda finished: None)
    assert merge("run", str(tmp_path / "merged")) == 0
    merged, saved = load(tmp_path / "merged"), AutoTokenizer.from_pretrained(tmp_path / "merged")
    rows = merged.get_input_embeddings().weight
    assert len(saved) == len(rows) == merged.config.vocab_size == 422
    assert (merged.get_output_embeddings().weight is rows) == merged.config.tie_word_embeddings == tied
    ids = saved("<|tool|> red <|obs|>", return_tensors="pt").input_ids
    assert {420, 421} < set(ids.tolist()[0])
    assert (logits(merged, ids) - logits(live, ids)).abs().max() < 1e-5
    before = load(tmp_path / "base").get_input_embeddings().weight
    assert torch.equal(rows[:420], before)
    assert (rows[420] - before.mean(0)).abs().max() > 1e-2 < (rows[420] - rows[421]).abs().max()
    assert merge("run", str(tmp_path / "narrow"), "bfloat16") == 0


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared test data beside the checkout")
@pytest.mark.parametrize("kind", ["nf4", pytest.param("plain", marks=pytest.mark.long)])
def test_a_model_that_nobody_here_made(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)
    words = "lora.target_modules=all-linear training.max_steps=8 training.num_train_epochs=null"
    words += " data.max_length=128 data.answer_rows=0 data.validation=0.1 training.learning_rate=5e-3"
    shutil.copy(finished_place() / "recipe.yaml", tmp_path / "recipe.yaml")
    rows = json.loads((SHARED / "data" / "alpaca_2000.json").read_text())[:80]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    words += f" model.name_or_path={SHARED}/assets/stories260K data.path=rows.json"
    life = train_in(tmp_path, *words.split(), *(NF4 if kind == "nf4" else []))
    assert life.rank_codes() == [0], life.output()[-3000:]
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    for dtype in ("float32", "bfloat16"):
        assert merge("runs/recipe", str(tmp_path / dtype), dtype) == 0
        found = figures(capsys.readouterr().out)
        print(kind, dtype, found)
        assert found["the merged model, read back from disk"] < found["the base without the adapter"]
    assert load(tmp_path / "float32").config.tie_word_embeddings
