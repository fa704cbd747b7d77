"""Joined rows: without padding, with the labels they have alone, and apart from each other in every model."""

import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import repeat_kv

from tiny_training import NF4, build_base, build_data, build_recipe, plan_of
from training_scenarios import run_of
from tunebook.errors import Refused, TrainingFailed
from tunebook.launching.process_group import start_process_group, stop_process_group
from tunebook.launching.world import World
from tunebook.model.attention import kept_for_attention
from tunebook.model.shapes import build_shape
from tunebook.training.batches import FILLER, BatchLayout, GlobalBatchSampler, join_rows, pad_right, tensors_of
from tunebook.training.failures import explaining
from tunebook.training.packing import check_rows_apart, measure_apart
from tunebook.training.row_masks import attention_of, known_rows, spares_masks_of

pytestmark = pytest.mark.slow

ROWS = [
    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
    {"input_ids": [8], "labels": [8]},  # a label that no token is asked for
    {"input_ids": [9, 3, 3, 4], "labels": [9, -100, 3, 4]},
]
SMALL = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
KEEP_APART = {
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "llama": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {"head_dim": 16, "sliding_window": 6},
    "phi3": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
}
LET_SEE = {
    "bloom": {"n_head": 4, "n_layer": 2},  # no positions to restart
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},  # positions from the mask
    "mamba": {"state_size": 8},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "full_attention"]},
    "jamba": {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
}


def build(kind, attention="eager", **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SMALL, **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def test_joined_rows_have_no_padding_and_no_label_across_a_border():
    batch = join_rows([ROWS[0], FILLER, *ROWS[1:]])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 3, 3, 4]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, -100, -100, 3, 4]]
    assert {tensor.dtype for tensor in tensors_of(batch).values()} == {torch.int64}
    assert tensors_of(batch).keys() == {"input_ids", "position_ids", "labels"}, "a mask would undo the positions"
    apart = pad_right(ROWS)
    for number in ("num_rows", "num_row_tokens", "num_trained_tokens"):
        assert batch[number] == apart[number]


def test_a_place_without_rows_trains_nothing():
    batch = join_rows([FILLER, FILLER])
    assert batch["input_ids"].shape == (1, 2)
    assert (batch["num_rows"], batch["num_row_tokens"], batch["num_trained_tokens"]) == (0, 0, 0)
    assert set(batch["labels"].flatten().tolist()) == {-100}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_each_joined_row_has_the_logits_it_has_alone(attention):  # case G01
    model = build("qwen2", attention)
    batch = tensors_of(join_rows(ROWS))
    del batch["labels"]
    alone = [model(input_ids=torch.tensor([row["input_ids"]])).logits[0] for row in ROWS]

    def largest_difference(**inputs):
        return float((model(**inputs).logits[0] - torch.cat(alone)).abs().max())

    with torch.no_grad():
        assert largest_difference(**batch, use_cache=False) < 1e-5
        # What upstream does with the smallest departure from that form; when this fails, less care is needed.
        assert largest_difference(**batch, use_cache=False, attention_mask=torch.ones(1, 8, dtype=torch.int64)) > 0.05
        assert largest_difference(**batch, use_cache=True) > 0.05
        assert largest_difference(input_ids=batch["input_ids"], use_cache=False) > 0.05


CHUNKS = {"head_dim": 16, "num_local_experts": 2, "attention_chunk_size": 8, "intermediate_size_mlp": 64}
PADDED = {**KEEP_APART, **LET_SEE, "llama4_text": CHUNKS}
NO_SDPA = ("gemma2", "bloom", "mamba")
LENGTHS = (20, 3, 13)  # longer than the windows and the chunks


@pytest.mark.parametrize("kind", PADDED)
def test_padding_that_is_known_leaves_logits_and_gradient_as_the_mask_does(kind):
    model = build(kind, "eager" if kind in NO_SDPA else "sdpa", **PADDED[kind])
    batch = pad_right([{"input_ids": list(range(5, 5 + n)), "labels": list(range(5, 5 + n))} for n in LENGTHS])
    inputs = tensors_of(batch)
    del inputs["labels"]
    real = inputs["attention_mask"].bool()

    def logits_and_gradient(given):
        model.zero_grad()
        logits = model(**given, use_cache=False).logits[real]
        logits.square().sum().backward()
        return logits.detach(), model.get_input_embeddings().weight.grad.clone()

    masked = logits_and_gradient(inputs)
    assert spares_masks_of(model, "float32"), "here is no GPU"
    with known_rows(attention_of(model), inputs) as given:
        known = logits_and_gradient(given)
    for one, other in zip(masked, known, strict=True):
        assert (one - other).abs().max() <= 1e-5 * one.abs().max()


def test_inside_known_rows_no_mask_is_made_where_none_is_needed(monkeypatch):
    model = build("qwen2", "sdpa")
    masks = []
    layer = model.model.layers[0]
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *a, **k: masks.append(k["attention_mask"]) or forward(*a, **k))
    padded, joined, one = (tensors_of(batch) for batch in (pad_right(ROWS), join_rows(ROWS), join_rows(ROWS[2:])))
    for inputs in (padded, joined, one):
        del inputs["labels"]
        with known_rows("sdpa", inputs) as given:
            model(**given, use_cache=False)
    model(**padded, use_cache=False)
    no_mask, rows, single, asked = masks
    assert no_mask is None and single is None and asked.shape == (3, 1, 4, 4)
    with known_rows("sdpa", {**padded, "attention_mask": torch.ones(3, 4).long()}, spared=False) as given:
        model(**given, use_cache=False)
    assert masks[-1].shape == (3, 1, 4, 4), "sdpa would make all scores without one"
    row = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2])
    assert torch.equal(rows[0, 0], (row[:, None] == row) & torch.ones(8, 8).tril().bool())


TWO_ROWS = [{"input_ids": list(range(5, 5 + n)), "labels": list(range(5, 5 + n))} for n in (9, 3)]
MICRO_BATCHES = {
    "padded": pad_right(TWO_ROWS),
    "one row": pad_right(TWO_ROWS[:1]),
    "joined": join_rows(TWO_ROWS),
    "one row, packed": join_rows(TWO_ROWS[:1]),
}


def inputs_of(batch):
    return {name: tensor for name, tensor in tensors_of(batch).items() if name != "labels"}


@pytest.mark.parametrize("batch", MICRO_BATCHES)
@pytest.mark.parametrize("spared", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("kind", "window"), [("qwen2", None), ("llama", None), ("mistral", 9), ("mistral", 13)])
def test_what_attention_keeps_is_what_the_memory_plan_counts(kind, window, attention, spared, batch, monkeypatch):
    model = build(kind, attention, **({} if window is None else {"sliding_window": window}))
    seen = {"masks": [], "repeated": 0}

    def repeat(states, times):
        seen["repeated"] += 1
        return repeat_kv(states, times)

    for place in ("integrations.sdpa_attention", f"models.{kind}.modeling_{kind}"):
        monkeypatch.setattr(f"transformers.{place}.repeat_kv", repeat)
    for layer in model.model.layers:
        forward = layer.forward
        monkeypatch.setattr(
            layer, "forward", lambda *a, to=forward, **k: seen["masks"].append(k["attention_mask"]) or to(*a, **k)
        )
    inputs = inputs_of(MICRO_BATCHES[batch])
    with known_rows(attention, inputs, spared) as given:
        model(**given, use_cache=False)
    shape = build_shape(model.config.to_dict(), "")
    kept = kept_for_attention(attention, shape, inputs["input_ids"].shape[1], joined=batch == "joined", spared=spared)
    assert kept == (all(mask is not None for mask in seen["masks"]), seen["repeated"] == 2 * 2)
    assert kept.masked == any(mask is not None for mask in seen["masks"]) and seen["repeated"] in (0, 4)


@pytest.mark.parametrize("batch", MICRO_BATCHES)
def test_a_compiled_model_always_has_a_mask_beside_sdpa(batch):
    graphs = []
    model = build("qwen2", "sdpa")
    torch.compiler.reset()
    compiled = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    with torch.no_grad():
        compiled(**inputs_of(MICRO_BATCHES[batch]), use_cache=False)
    calls = [node for graph in graphs for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
    kept = kept_for_attention("sdpa", build_shape(model.config.to_dict(), ""), 9, spared=False)
    assert len(calls) == 2 and kept == (True, True)
    assert all(call.kwargs["attn_mask"] is not None and not call.kwargs.get("enable_gqa") for call in calls)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KEEP_APART)
def test_models_that_keep_rows_apart_are_let_through(kind, dtype):
    for attention in ("eager",) if kind in NO_SDPA else ("sdpa", "eager"):
        model = build(kind, attention, **KEEP_APART[kind]).to(getattr(torch, dtype))
        state = torch.get_rng_state()
        check_rows_apart(build_recipe("base", packing=True), model.train(), dtype)
        assert model.training and torch.equal(torch.get_rng_state(), state)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert measure_apart(model, dtype).reached == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", LET_SEE)
def test_models_that_let_rows_see_each_other_are_refused(kind, dtype):
    model = build(kind, **LET_SEE[kind]).to(getattr(torch, dtype))
    with pytest.raises(Refused, match=r"data\.packing.* would let joined rows see each other.*packing: false"):
        check_rows_apart(build_recipe("base", packing=True), model, dtype)


def test_what_is_looked_at_is_what_a_run_trains_on():
    """OPT's positions reach no mask of transformers': its rows are apart by ours, which a compiled run does without."""
    model = build("opt", "sdpa", **LET_SEE["opt"])
    check_rows_apart(build_recipe("base", packing=True), model, "float32")
    with pytest.raises(Refused, match="would let joined rows see each other"):
        check_rows_apart(build_recipe("base", packing=True, torch_compile=True), model, "float32")


def test_a_model_that_never_spares_its_mask_keeps_rows_apart_too():
    model = build("falcon", "sdpa", alibi=False, new_decoder_architecture=False)
    assert measure_apart(model, "float32").reached == 0.0
    assert measure_apart(model, "float32", compiled=True).reached == 0.0


def test_a_model_that_takes_no_positions_or_counts_in_chunks_is_refused():
    recipe = build_recipe("base", packing=True)
    model = build("llama")
    forward = model.forward
    model.forward = lambda input_ids, attention_mask=None, use_cache=None: forward(input_ids, attention_mask)
    with pytest.raises(Refused, match=r"takes no joined rows: .*position_ids"):
        check_rows_apart(recipe, model, "float32")
    chunks = build("llama4_text", **CHUNKS)
    with pytest.raises(Refused, match="in chunks of 8 tokens"):
        check_rows_apart(recipe, chunks, "float32")


def test_positions_that_go_on_are_refused_though_no_row_is_seen():
    """GPT-2 with its mask from the restarted positions, and learned positions that count on over the border."""
    model = build("gpt2", n_embd=64, n_layer=2, n_head=4, n_positions=128)
    learned = model.transformer.wpe
    model.transformer.wpe.forward = lambda ids: torch.nn.functional.embedding(
        torch.arange(ids.shape[1])[None], learned.weight
    )
    apart = measure_apart(model, "float32")
    assert apart.reached == 0.0 and not apart.holds("float32")


@pytest.fixture
def base(tmp_path):
    start_process_group(World())
    yield build_base(tmp_path / "base")
    stop_process_group()


@pytest.mark.parametrize("quantization", [None, NF4, {"load_in_8bit": True}])
def test_the_check_runs_on_the_model_of_the_run(base, quantization):
    run = run_of(base.parent, World(), "packed", build_data(), quantization=quantization, packing=True)
    assert run.collate is join_rows
    apart = measure_apart(run.model, "float32")
    assert apart.reached == 0.0 and apart.in_view > 0.05


def test_a_run_that_would_mix_rows_is_refused_before_it_begins(base):
    build("bloom", n_head=4, n_layer=2).save_pretrained(base)
    assert run_of(base.parent, World(), "plain", build_data()).collate is pad_right
    with pytest.raises(Refused, match=r"BloomForCausalLM\) would let joined rows see each other"):
        run_of(base.parent, World(), "packed", build_data(), packing=True)
    assert not (base.parent / "1").exists()


@pytest.mark.parametrize(
    ("collate", "sizes"), [(pad_right, "tokens, per_device"), (join_rows, "tokens, joined to 8, per_device")]
)
def test_running_out_of_memory_names_the_rows(tmp_path, collate, sizes):
    plan = plan_of(build_recipe("base", packing=True), World(), build_data(), tmp_path)
    training = SimpleNamespace(last_micro_batch=collate(ROWS), state=SimpleNamespace(global_step=4))
    expected = f"step 5: 3 rows of up to 4 {sizes}.*max_length below 4"
    with pytest.raises(TrainingFailed, match=expected), explaining(training, plan):
        raise MemoryError


def test_joined_micro_batches_are_balanced_by_their_tokens():
    draw = random.Random(1)
    lengths = [draw.randrange(2, 400) for _ in range(64)]

    def spread(packed):
        sampler = GlobalBatchSampler(lengths, BatchLayout(64, 2, 4, 0, packed), seed=0)
        sampler.set_epoch(0)
        sums = [sum(lengths[row] for row in batch) for batch in sampler]
        return max(sums) / min(sums)

    assert spread(packed=True) < 1.2 < spread(packed=False)
