"""The loss made where labels count, and in pieces: sum and gradient are those of all logits at once."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
)

from tunebook.system.quiet import quiet_libraries
from tunebook.training import head_loss
from tunebook.training.batches import FILLER, join_rows, pad_right, tensors_of
from tunebook.training.head_loss import HeadLoss
from tunebook.training.loss import count_right, summed_token_loss
from tunebook.training.packing import measure_apart

pytestmark = pytest.mark.slow
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "pad_token_id": 0,
}
ROWS = [
    {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, 7, 8, 9]},
    {"input_ids": [3, 4], "labels": [-100, 4]},
    {"input_ids": [11, 12, 13, 14, 15, 16, 17], "labels": [11, 12, -100, 14, 15, 16, 17]},
]
FAMILIES = {
    "qwen2": Qwen2Config(**SIZES),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gemma2": Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=3.0),
    "cohere": CohereConfig(**SIZES, logit_scale=0.25),
    "granite": GraniteConfig(**SIZES, logits_scaling=4.0),
}


def build(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def plain_way(model, batch):
    inputs = tensors_of(batch)
    labels = inputs.pop("labels")
    logits = model(**inputs, use_cache=False).logits
    return summed_token_loss(logits, labels), count_right(logits, labels)


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def largest_part(ours, plain):
    """Return the largest difference of two gradients, as a part of the largest number of the second."""
    assert ours.keys() == plain.keys() and plain
    return max(float((ours[name] - plain[name]).abs().max() / plain[name].abs().max()) for name in plain)


@pytest.mark.parametrize("collate", [pad_right, join_rows], ids=["padded", "packed"])
@pytest.mark.parametrize("in_pieces", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_sum_and_gradients_are_those_of_all_logits(family, in_pieces, collate, monkeypatch):
    monkeypatch.setattr(head_loss, "LOGITS_AT_ONCE", 4 * 101)  # four logits' worth of tokens: three pieces here
    model, batch = build(FAMILIES[family]), collate(ROWS)
    plain, right = plain_way(model, batch)
    expected = gradients_of(model, plain)
    made = HeadLoss(model, "float32", in_pieces)
    assert not made.is_plain
    ours = made.sums(model, tensors_of(batch), batch["targets"], want_right=True)
    assert ours.loss.item() == pytest.approx(plain.item(), rel=1e-6) and int(ours.right) == int(right)
    assert largest_part(gradients_of(model, ours.loss), expected) < 1e-5
    assert "forward" not in vars(model.get_output_embeddings()), "the head is itself again"


def test_logits_exist_for_labels_only_and_a_piece_at_a_time(monkeypatch):
    monkeypatch.setattr(head_loss, "LOGITS_AT_ONCE", 4 * 101)
    model, batch = build(FAMILIES["qwen2"]), pad_right(ROWS)
    head, made = model.get_output_embeddings(), []
    own = head.forward
    head.forward = lambda states: made.append(len(states)) or own(states)
    ours = HeadLoss(model, "float32")
    del made[:]
    ours.sums(model, tensors_of(batch), batch["targets"])[0].backward()
    assert batch["num_trained_tokens"] == 9 and made == [4, 4, 1, 1, 4, 4], "each piece again in the backward"
    del made[:]
    with torch.no_grad():
        ours.sums(model, tensors_of(batch), batch["targets"])
    assert made == [4, 4, 1]
    monkeypatch.setattr(head_loss, "LOGITS_AT_ONCE", 9 * 101)
    del made[:]
    ours.sums(model, tensors_of(batch), batch["targets"])[0].backward()
    assert made == [9], "one piece is made once"


def test_new_tokens_are_looked_past():
    from peft import LoraConfig, get_peft_model

    with quiet_libraries():
        settings = {"r": 2, "target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [5]}}
        model = get_peft_model(build(FAMILIES["llama"]), LoraConfig(**settings)).eval()
    batch = pad_right(ROWS)
    ours = HeadLoss(model, "float32").sums(model, tensors_of(batch), batch["targets"]).loss
    assert ours.item() == pytest.approx(plain_way(model, batch)[0].item(), rel=1e-6)
    assert measure_apart(model, "float32").holds("float32"), "joined rows are looked at in the same way"


def test_rows_without_a_label_have_loss_and_gradient_0():
    model, batch = build(FAMILIES["qwen2"]), pad_right([FILLER])
    loss = HeadLoss(model, "float32").sums(model, tensors_of(batch), batch["targets"]).loss
    assert loss.item() == 0
    assert not any(gradient.any() for gradient in gradients_of(model, loss).values())


def test_a_model_with_a_loss_of_its_own_makes_all_logits():
    router = MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1, output_router_logits=True)
    model, batch = build(router), pad_right(ROWS)
    made = HeadLoss(model, "float32")
    assert made.is_plain and HeadLoss(build(FAMILIES["qwen2"]), "float32", compiled=True).is_plain
    ours = made.sums(model, tensors_of(batch), batch["targets"], want_right=True)
    plain, right = plain_way(model, batch)
    assert (ours.loss.item(), ours.right.item()) == (plain.item(), right.item())


def test_what_a_model_makes_of_its_logits_is_found_out_or_left_to_it():
    model = build(FAMILIES["qwen2"])
    own = model.forward

    def squared(*args, **kwargs):
        outputs = own(*args, **kwargs)
        outputs.logits = outputs.logits.square()
        return outputs

    model.forward = squared
    assert HeadLoss(model, "float32").is_plain


@pytest.mark.parametrize(
    "kept", [{"target_modules": ["lm_head"], "lora_dropout": 0.5}, {"modules_to_save": ["lm_head"]}]
)
def test_a_head_that_is_trained_gets_its_gradient(kept, monkeypatch):
    from peft import LoraConfig, get_peft_model

    monkeypatch.setattr(head_loss, "LOGITS_AT_ONCE", 4 * 101)
    settings = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False, **kept}
    with quiet_libraries():
        model = get_peft_model(build(FAMILIES["qwen2"]), LoraConfig(**settings)).eval()
    batch = pad_right(ROWS)
    expected = gradients_of(model, plain_way(model, batch)[0])
    ours = HeadLoss(model, "float32").sums(model, tensors_of(batch), batch["targets"]).loss
    assert any("lm_head" in name for name in expected)
    assert largest_part(gradients_of(model, ours), expected) < 1e-5
    model.train()
    torch.manual_seed(1)
    dropped = HeadLoss(model, "float32").sums(model, tensors_of(batch), batch["targets"]).loss
    with torch.random.fork_rng():
        torch.manual_seed(1)
        again = HeadLoss(model, "float32").sums(model, tensors_of(batch), batch["targets"]).loss
    assert dropped.item() == again.item()
