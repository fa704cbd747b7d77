"""The loss of a step is over the labels of the whole step, whatever a model computes by itself and Trainer knows of it.

Many classes take no number of labels (`accepts_loss_kwargs`), as Gemma3ForConditionalGeneration, or use none: left to
themselves they take the mean of each micro-batch.
"""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen2ForCausalLM

from tiny_training import build_data
from training_scenarios import compiling_alone, logged_losses, run_of
from tunebook.launching.world import World
from tunebook.training.batches import pad_right, tensors_of
from tunebook.training.head_loss import HeadLoss
from tunebook.training.loss import summed_token_loss
from tunebook.training.run import train

pytestmark = pytest.mark.slow
SMOOTHING = 0.1
WAYS = {
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
    "smoothed": {"label_smoothing_factor": SMOOTHING},
    "compiled and smoothed": {"torch_compile_backend": "eager", "label_smoothing_factor": SMOOTHING},
}


@pytest.fixture
def folder(tmp_path):
    with compiling_alone(tmp_path):
        yield tmp_path


def losses_at_rate_0(folder, size, **recipe):
    """Return the logged loss of each step, in micro-batches of `size` rows, of weights that stay as they are."""
    settings = {"per_device_train_batch_size": size, "learning_rate": 0.0, "num_train_epochs": 1, **recipe}
    run = run_of(folder, World(), f"{size}", build_data(num_examples=0), **settings)
    train(run)
    return logged_losses(Path(run.plan.run_dir)), run


def true_losses(run, smoothing):
    """Return the mean over the labels of each step, from one forward per row, with nothing of tunebook's in it."""
    run.batches.set_epoch(0)
    found = []
    for rows in run.batches.rows_of_steps():
        total, number = 0.0, 0
        for row in run.data.train.select(rows):
            with torch.no_grad():
                logits = run.model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
            labels = torch.tensor(row["labels"][1:])
            options = {"ignore_index": -100, "reduction": "none", "label_smoothing": smoothing}
            total += float(cross_entropy(logits, labels, **options).double().sum())
            number += int((labels != -100).sum())
        found.append(total / number)
    return found


@pytest.mark.long
@pytest.mark.parametrize("takes_number", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_logged_loss_is_the_mean_over_all_labels_of_its_step(folder, monkeypatch, way, takes_number):
    monkeypatch.setattr(Qwen2ForCausalLM, "accepts_loss_kwargs", takes_number, raising=False)
    monkeypatch.setattr("transformers.trainer.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", {})  # a class that is not listed
    for size in (8, 1):
        losses, run = losses_at_rate_0(folder, size, **WAYS[way])
        expected = true_losses(run, WAYS[way].get("label_smoothing_factor", 0.0))
        assert len(losses) == 3 and losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
def test_a_compiled_model_trains_one_adapter_in_every_micro_batch(folder, monkeypatch):
    monkeypatch.setattr(Qwen2ForCausalLM, "accepts_loss_kwargs", False, raising=False)
    adapters = []
    for size in (8, 1):
        settings = {"per_device_train_batch_size": size, **WAYS["compiled"]}
        run = run_of(folder, World(), f"{size}", build_data(num_examples=0), **settings)
        train(run)
        adapters.append({name: one.detach().clone() for name, one in run.model.named_parameters() if one.requires_grad})
    one, other = adapters
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-6


@pytest.mark.parametrize("compiled", [False, True])
def test_smoothing_is_that_of_trainer_in_pieces_and_at_once(folder, monkeypatch, compiled):
    from transformers.trainer_pt_utils import LabelSmoother

    monkeypatch.setattr("tunebook.training.head_loss.LOGITS_AT_ONCE", 4 * 258)
    model = Qwen2ForCausalLM.from_pretrained(folder / "base")
    batch = pad_right(list(build_data(num_rows=3).train))
    inputs = tensors_of(batch)
    labels = inputs.pop("labels")
    number = torch.tensor(batch["num_trained_tokens"])
    smoother = LabelSmoother(epsilon=SMOOTHING)
    expected = smoother(model(**inputs), labels, shift_labels=True, num_items_in_batch=number) * number
    ours = HeadLoss(model, "float32", compiled=compiled)
    given = {**inputs, "labels": labels}
    found = ours.sums(model, given, batch["targets"], smoothing=SMOOTHING).loss
    assert found.item() == pytest.approx(expected.item())
    plain = summed_token_loss(model(**inputs).logits, labels)
    assert ours.sums(model, given, batch["targets"]).loss.item() == pytest.approx(plain.item())
    assert found.item() != pytest.approx(plain.item())
