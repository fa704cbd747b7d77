"""Every kind of adapter, on every kind of layer, goes into the weights: the merged model says what the adapter says."""

import shutil

import pytest
import torch
import transformers

from tiny_training import LORA, NF4, STOP, build_base
from tunebook.errors import Refused
from tunebook.export.finished import Finished
from tunebook.launching.process_group import process_group
from tunebook.launching.world import World
from tunebook.merge.merge import merge
from tunebook.model.adapter import write_adapter
from tunebook.system.quiet import quiet_libraries
from tunebook.training.run import build_trainer
from variant_scenarios import NEW, VARIANTS, run_of

pytestmark = [pytest.mark.slow, pytest.mark.long]
EMBEDDING = {**LORA, "target_modules": ["q_proj", "embed_tokens"]}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MORE = {
    "embedding": {"lora": EMBEDDING},
    "embedding of a tied head": {"lora": EMBEDDING, "base": "tied"},
    "tied head": {"lora": {**LORA, "target_modules": ["q_proj", "lm_head"]}, "base": "tied"},
    "embedding and head, kept tied": {"lora": {**EMBEDDING, "ensure_weight_tying": True}, "base": "tied"},
}
# Refused before training, or trained without an adapter.
NO_ADAPTER = ("8-bit base dora", "new tokens, all weights", "all weights")
SMALL = {
    "vocab_size": 258,
    "max_position_embeddings": 256,
    "pad_token_id": 256,
    "eos_token_id": STOP,
    "bos_token_id": 1,
}
SHAPE = SMALL | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
GPT2 = {"vocab_size": 258, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "eos_token_id": STOP}
KINDS = {
    "GPT2": ("GPT2Config", GPT2, {}),
    "GPT2 in NF4": ("GPT2Config", GPT2, {"quantization": NF4}),
    "Phi3": ("Phi3Config", SHAPE | {"intermediate_size": 128}, {"quantization": NF4}),
    "Gemma2": (
        "Gemma2Config",
        SHAPE | {"intermediate_size": 128, "head_dim": 16},
        {"model": {"attn_implementation": "eager"}},
    ),
    "Mixtral": (
        "MixtralConfig",
        SHAPE | {"intermediate_size": 128, "num_local_experts": 4},
        {"lora": {**LORA, "target_modules": ["q_proj"], "target_parameters": EXPERTS}},
    ),
    "OPT with biases": (
        "OPTConfig",
        {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}
        | {"ffn_dim": 128, "word_embed_proj_dim": 64},
        {"lora": {**LORA, "lora_bias": True}},
    ),
    "Qwen2 in bfloat16": ("Qwen2Config", SHAPE, {"lora": {**LORA, "modules_to_save": ["lm_head"]}}),
    "Qwen2 in bfloat16, new tokens": ("Qwen2Config", SHAPE | {"tie_word_embeddings": True}, {"model": NEW}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("merged")
    build_base(made / "base")
    build_base(made / "tied", tie_word_embeddings=True)
    build_base(made / "spare", vocab_size=320)
    return made


def train_two_steps(folder, name, recipe):
    """Train and write an adapter that changes much; return its run as a finished one."""
    place = name.replace(" ", "_")
    with process_group(World()), quiet_libraries():
        run = run_of(folder, place, **{"learning_rate": 2e-2, **recipe})
        build_trainer(run, None).train_on(None)
        write_adapter(run.model, run.tokenizer, run.recipe, folder / "runs" / place / "adapter", STOP)
    return Finished(folder / "runs" / place, run.recipe, {}, run.plan)


def check_merge(finished, tmp_path, monkeypatch):
    monkeypatch.setattr("tunebook.merge.merge.open_finished", lambda *given: finished)
    monkeypatch.setattr("tunebook.merge.merge._write_card", lambda *given: None)  # of a run without a plan
    monkeypatch.setattr("tunebook.merge.merge.card_facts", lambda finished: None)
    for dtype in ("float32", "bfloat16"):
        assert merge("run", str(tmp_path / dtype), dtype) == 0, dtype


@pytest.mark.parametrize("name", [name for name in (*VARIANTS, *MORE) if name not in NO_ADAPTER])
def test_each_variant(folder, tmp_path, monkeypatch, name):
    finished = train_two_steps(folder, name, (VARIANTS | MORE)[name])
    if name == "lora_bias":
        with pytest.raises(Refused, match=r"o_proj cannot be merged: .* the base layer has no bias\. Use the adapter"):
            check_merge(finished, tmp_path, monkeypatch)
        assert list(tmp_path.iterdir()) == []
        return
    check_merge(finished, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_layer(folder, tmp_path, monkeypatch, name):
    config, shape, recipe = KINDS[name]
    base = folder / name.replace(" ", "_")
    shutil.copytree(folder / "base", base, ignore=shutil.ignore_patterns("model*", "config.json", "generation*"))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**shape))
    with quiet_libraries():
        model.to(torch.bfloat16 if "bfloat16" in name else torch.float32).save_pretrained(base, max_shard_size="100KB")
    check_merge(train_two_steps(folder, name, {**recipe, "base": base.name}), tmp_path, monkeypatch)
    saved, written = (
        transformers.AutoModelForCausalLM.from_pretrained(place) for place in (base, tmp_path / "float32")
    )
    assert set(saved.state_dict()) == set(written.state_dict())
