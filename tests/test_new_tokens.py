"""Tokens that a recipe adds: one id each in the text of rows, their rows trained, and the whole comes back."""

import json
from dataclasses import replace

import pytest
import torch

from architectures import build_architecture
from tiny_data import CASES
from tiny_models import build_tiny_model
from tunebook.data.prepare import prepare_data
from tunebook.data.tokenizer import tokenizer_of
from tunebook.errors import Refused
from tunebook.launching.process_group import process_group
from tunebook.launching.world import World
from tunebook.model.new_tokens import make_room, start_rows, trained_rows
from tunebook.plan.plan import build_plan, with_split
from tunebook.recipe.reading import load_recipe
from tunebook.system.quiet import quiet_libraries

pytestmark = pytest.mark.slow
TOKENS = ["<|tool|>", "<|obs|>"]


def recipe_for(model, tmp_path, tokens=TOKENS, **training):
    text = f"""
model: {{name_or_path: {model}, dtype: float32, add_special_tokens: {json.dumps(tokens)}}}
lora: {{r: 4, lora_alpha: 8}}
data: {{path: {CASES / "X05" / "data.jsonl"}}}
training: {{global_batch_size: 4, per_device_train_batch_size: 2, learning_rate: 5e-2, num_train_epochs: 5}}
"""
    (tmp_path / "case.yaml").write_text(text)
    return load_recipe(str(tmp_path / "case.yaml"))


@pytest.mark.parametrize("saved", [None, ["embed_tokens"]])
def test_a_model_with_new_tokens_is_looked_at_before_training(tmp_path, saved):
    """Wrapped by peft, its embedding has no number of rows, which packing and the loss at the head ask for."""
    from tunebook.model.model import build_model
    from tunebook.training.head_loss import HeadLoss
    from tunebook.training.packing import check_rows_apart

    recipe = recipe_for(build_tiny_model(tmp_path / "base"), tmp_path)
    recipe = replace(recipe, lora={**recipe.lora, "modules_to_save": saved})
    model = build_model(recipe, build_plan(recipe, World()), World(), tokenizer_of(recipe))
    assert len(model.get_input_embeddings().weight) == 422
    check_rows_apart(recipe, model, "float32")
    HeadLoss(model, "float32", True, False)


@pytest.mark.parametrize("tokenizer", ["bytelevel", "metaspace"])
def test_added_tokens_are_trained_where_rows_hold_them_and_come_back(tmp_path, monkeypatch, tokenizer):
    from peft import AutoPeftModelForCausalLM
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    from tunebook.training.ready import build_run
    from tunebook.training.run import train

    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    recipe = recipe_for(build_tiny_model(tmp_path / "base", tokenizer=tokenizer), tmp_path)
    made = tokenizer_of(recipe)
    ids = made.convert_tokens_to_ids(TOKENS)
    assert ids == [420, 421] and len(made) == 422
    data = prepare_data(recipe, made)
    for row in data.train:
        assert [label for label in row["labels"] if label in ids] == ids, "each is one token, and is trained"
    plan = build_plan(recipe, World(), run_dir=str(tmp_path / "run"))
    plan = with_split(plan, data.num_train_rows, data.num_eval_rows, {})
    with process_group(World()):
        result = train(build_run(recipe, plan, World(), made, data))
    saved = AutoTokenizer.from_pretrained(plan.adapter_dir)
    assert len(saved) == 422 and saved.convert_tokens_to_ids(TOKENS) == ids
    with quiet_libraries():
        loaded = AutoPeftModelForCausalLM.from_pretrained(plan.adapter_dir).eval()
    inputs = saved("<|tool|> red <|obs|>", return_tensors="pt").input_ids
    assert inputs.tolist()[0].count(420) == 1
    with torch.no_grad():
        difference = loaded(input_ids=inputs).logits - result.run.model.eval()(input_ids=inputs, use_cache=False).logits
    assert difference.abs().max() < 1e-5
    rows = [
        value for name, value in load_file(f"{plan.adapter_dir}/adapter_model.safetensors").items() if "token" in name
    ]
    assert len(rows) == 2 and all((first - second).abs().max() > 1e-2 for first, second in rows), "they began equal"


@pytest.mark.parametrize("tokenizer", ["bytelevel", "metaspace"])
def test_the_new_token_that_ends_a_turn_is_special_in_what_is_saved(tmp_path, monkeypatch, tokenizer):
    """Others are not: an answer may hold them, and who decodes it is to see them."""
    from transformers import AutoTokenizer

    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|stop|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
    )
    answers = ["red<|tool|>", "blue<|stop|>green"]
    rows = [{"prompt": "Name a color.", "completion": answer} for answer in answers]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = recipe_for(
        build_tiny_model(tmp_path / "base", tokenizer=tokenizer), tmp_path, ["<|start|>", "<|stop|>", "<|tool|>"]
    )
    data = recipe.data.model_copy(
        update={"path": str(tmp_path / "rows.jsonl"), "template": str(tmp_path / "own.jinja"), "max_bad_fraction": 1.0}
    )
    made = tokenizer_of(recipe)
    stop, tool = made.convert_tokens_to_ids(["<|stop|>", "<|tool|>"])
    prepared = prepare_data(replace(recipe, data=data), made)
    assert prepared.stop_token_id == stop
    made.save_pretrained(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for row, answer in zip(prepared.train, answers, strict=True):
        labels = [label for label in row["labels"] if label != -100]
        assert labels[-1] == stop and labels.count(stop) == 1, "an answer's own text is no end of it"
        assert saved.decode(labels[:-1]).strip().startswith(answer[:3])
        shown = [saved.decode(ids, skip_special_tokens=True) for ids in (labels, labels[:-1])]
        assert shown[0] == shown[1] and ("<|tool|>" in shown[0]) == ("<|tool|>" in answer)
    assert saved.added_tokens_decoder[stop].special and not saved.added_tokens_decoder[tool].special
    assert saved.get_vocab() == made.get_vocab() and len(saved) == 423
    assert not any("stands in no training row" in note for note in prepared.notes)


def test_a_new_token_in_no_row_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    base = build_tiny_model(tmp_path / "base")
    for tokens, told in [
        ([*TOKENS, "<|tool>"], "<|tool> (model.add_special_tokens) stands in no training row"),
        (["<|a|>", "<|b|>"], "<|a|>, <|b|> (model.add_special_tokens) stand in no training row"),
        (TOKENS, None),
    ]:
        recipe = recipe_for(base, tmp_path, tokens)
        notes = [note for note in prepare_data(recipe, tokenizer_of(recipe)).notes if "no training row" in note]
        assert len(notes) == (told is not None) and all(told in note for note in notes)


def test_a_token_that_is_there_already_is_refused(tmp_path):
    base = build_tiny_model(tmp_path / "base")
    with pytest.raises(Refused, match=r"model.add_special_tokens: <\|im_end\|>, a are in the vocabulary already"):
        tokenizer_of(recipe_for(base, tmp_path, ["<|im_end|>", "<|new|>", "a"]))


@pytest.mark.parametrize("name", ["Gemma-2-9B", "Qwen3-8B", "Phi-4"])
def test_new_rows_start_at_the_mean_of_the_known_ones(tmp_path, name):
    from transformers import AutoModelForCausalLM

    recipe = recipe_for(build_architecture(name, tmp_path / "model"), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokenizer = tokenizer_of(recipe)
    ids, before = tokenizer.convert_tokens_to_ids(TOKENS), model.get_input_embeddings().weight.detach().clone()
    make_room(model, tokenizer)
    start_rows(model, ids)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert embedding.shape[0] == head.shape[0] == model.config.vocab_size == len(before) + 2
    assert torch.equal(embedding[: len(before)], before)
    assert torch.allclose(embedding[ids], before.mean(0)) and torch.allclose(head[ids], head[: len(before)].mean(0))
    assert (head is embedding) == model.config.tie_word_embeddings
    rows = {"embed_tokens": ids} | ({} if head is embedding else {"lm_head": ids})
    assert trained_rows(model, ids) == rows
