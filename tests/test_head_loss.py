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
from tunebook.training.loss import count_right, summed_token_loss, token_losses
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
@pytest.mark.parametrize("ways", ["pieces, frozen head", "pieces", "at once"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sum_and_gradients_are_those_of_all_logits(family, ways, collate, monkeypatch):
    monkeypatch.setattr(head_loss, "LOGITS_AT_ONCE", 4 * 101)  # four logits' worth of tokens: three pieces here
    model, batch = build(FAMILIES[family]), collate(ROWS)
    if "frozen" in ways:
        model.get_output_embeddings().requires_grad_(False)
    plain, right = plain_way(model, batch)
    expected = gradients_of(model, plain)
    made = HeadLoss(model, "float32", in_pieces="pieces" in ways)
    assert not made.is_plain
    ours = made.sums(model, tensors_of(batch), batch["targets"], want_right=True)
    assert ours.loss.item() == pytest.approx(plain.item(), rel=1e-6) and int(ours.right) == int(right)
    assert largest_part(gradients_of(model, ours.loss), expected) < 1e-5
    assert "forward" not in vars(model.get_output_embeddings()), "the head is itself again"


@pytest.mark.parametrize("is_frozen", [True, False])
def test_logits_exist_for_labels_only_and_a_piece_at_a_time(is_frozen, monkeypatch):
    monkeypatch.setattr(head_loss, "LOGITS_AT_ONCE", 4 * 101)
    model, batch = build(FAMILIES["qwen2"]), pad_right(ROWS)
    head, made = model.get_output_embeddings().requires_grad_(not is_frozen), []
    own = head.forward
    head.forward = lambda states: made.append(len(states)) or own(states)
    ours = HeadLoss(model, "float32")
    del made[:]
    ours.sums(model, tensors_of(batch), batch["targets"])[0].backward()
    again = [] if is_frozen else [1, 4, 4]
    assert batch["num_trained_tokens"] == 9 and made == [4, 4, 1, *again], "only a trained head needs them twice"
    del made[:]
    with torch.no_grad():
        ours.sums(model, tensors_of(batch), batch["targets"])
    assert made == [4, 4, 1]
    monkeypatch.setattr(head_loss, "LOGITS_AT_ONCE", 9 * 101)
    del made[:]
    ours.sums(model, tensors_of(batch), batch["targets"])[0].backward()
    assert made == [9], "one piece is made once"


def test_new_tokens_are_looked_past_and_get_their_gradient_from_a_tied_head(monkeypatch):
    from peft import LoraConfig, get_peft_model

    monkeypatch.setattr(head_loss, "LOGITS_AT_ONCE", 4 * 101)
    with quiet_libraries():
        settings = {"r": 2, "target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [5]}}
        model = get_peft_model(build(FAMILIES["llama"]), LoraConfig(**settings)).eval()
    batch = pad_right(ROWS)
    plain = plain_way(model, batch)[0]
    expected = gradients_of(model, plain)
    made = HeadLoss(model, "float32")
    ours = made.sums(model, tensors_of(batch), batch["targets"]).loss
    assert not made.is_plain and ours.item() == pytest.approx(plain.item(), rel=1e-6)
    assert any("token_adapter" in name for name in expected)
    assert largest_part(gradients_of(model, ours), expected) < 1e-5
    assert measure_apart(model, "float32").holds("float32"), "joined rows are looked at in the same way"


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_autocast_gives_the_gradient_of_its_own_plain_way(weights, monkeypatch):
    monkeypatch.setattr(head_loss, "LOGITS_AT_ONCE", 4 * 101)
    model, batch = build(FAMILIES["qwen2"]).to(weights), pad_right(ROWS)
    model.get_output_embeddings().requires_grad_(False)
    made = HeadLoss(model, "bfloat16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = plain_way(model, batch)[0] / 7
        ours = made.sums(model, tensors_of(batch), batch["targets"]).loss / 7
    assert ours.item() == pytest.approx(plain.item(), rel=1e-6)
    assert largest_part(gradients_of(model, ours), gradients_of(model, plain)) < 2e-2, "8 bits of a number are kept"


def test_a_head_thawed_later_gets_its_gradient(monkeypatch):
    monkeypatch.setattr(head_loss, "LOGITS_AT_ONCE", 4 * 101)
    model, batch = build(FAMILIES["qwen2"]), pad_right(ROWS)
    head = model.get_output_embeddings().requires_grad_(False)
    ours = HeadLoss(model, "float32")
    head.requires_grad_(True)
    expected = gradients_of(model, plain_way(model, batch)[0])
    found = gradients_of(model, ours.sums(model, tensors_of(batch), batch["targets"]).loss)
    assert "lm_head.weight" in expected and largest_part(found, expected) < 1e-5


def test_small_shares_of_many_tokens_are_not_lost_in_float16():
    # A label that is nearly sure; a hundred others hold 3e-8 each, half of what float16 tells from 0, and pull one way.
    weight = torch.tensor([[17.3, 0.0]] + [[0.0, 1.0]] * 100, dtype=torch.float16)
    states = torch.tensor([[1.0, 0.0]] * 3, dtype=torch.float16, requires_grad=True)

    def sum_piece(states, ids):
        return head_loss.Sums(token_losses((states @ weight.T).float(), ids).sum(dtype=torch.float64), None)

    loss, _ = head_loss._LossWithGradient.apply(states, torch.zeros(3, dtype=torch.int64), 2, sum_piece)
    (loss * 2**12).backward()  # as a scaler of losses does
    share = 100 / (torch.tensor(17.3, dtype=torch.float16).double().exp() + 100)
    assert (states.grad[:, 1].float() / 2**12).tolist() == pytest.approx([share.item()] * 3, rel=2e-2)


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


def test_dropout_in_a_head_is_the_same_when_a_piece_is_computed_again(monkeypatch):
    from peft import LoraConfig, get_peft_model

    settings = {"r": 2, "target_modules": ["lm_head"], "lora_dropout": 0.5, "init_lora_weights": False}
    with quiet_libraries():
        model = get_peft_model(build(FAMILIES["qwen2"]), LoraConfig(**settings)).train()
    batch = pad_right(ROWS)

    def gradients():
        torch.manual_seed(1)
        loss = HeadLoss(model, "float32").sums(model, tensors_of(batch), batch["targets"]).loss
        torch.manual_seed(2)  # whoever draws again in the backward without going back draws something else
        return gradients_of(model, loss)

    monkeypatch.setattr(head_loss, "LOGITS_AT_ONCE", 4 * 101)
    computed_again = gradients()
    monkeypatch.setattr(head_loss, "checkpoint", lambda function, *given, **options: function(*given))
    kept = gradients()
    assert any("lm_head" in name for name in kept) and largest_part(computed_again, kept) < 1e-6
