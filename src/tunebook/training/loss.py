"""The loss as a sum that can be added over batches and processes in any split, and what a loss must be."""

import math
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from tunebook.errors import TrainingFailed
from tunebook.launching.sharding import whole
from tunebook.training.batches import IGNORED_LABEL

DIVERGED_ADVICE = (
    "Lower training.learning_rate or add training.warmup_steps; instead of float16 use another model.dtype"
)


def summed_token_loss(logits: Any, labels: Any, smoothing: float = 0.0) -> Any:
    """Return the sum of the cross-entropies (nats) of all labels that count, a float64 scalar tensor.

    `logits` are (rows, tokens, vocabulary) and position i predicts `labels` (rows, tokens) at i + 1. Each token's loss
    is computed in float32 as transformers' causal language models do, and the sum in float64. With `smoothing` it is
    that share of the mean over the whole vocabulary, and the rest of the label's own (Szegedy et al. 2016, section 7).
    """
    targets = labels[:, 1:].reshape(-1)
    losses = token_losses(logits[:, :-1].reshape(-1, logits.shape[-1]).float(), targets, smoothing)
    return losses.sum(dtype=torch.float64)


def token_losses(scores: Any, ids: Any, smoothing: float = 0.0) -> Any:
    """Return the loss of each label from its float32 logits; it is 0 where none is trained."""
    return cross_entropy(scores, ids, ignore_index=IGNORED_LABEL, reduction="none", label_smoothing=smoothing)


def count_right(logits: Any, labels: Any) -> Any:
    """Return how many of the labels that count are what the model holds most likely, an int64 scalar tensor.

    Position i predicts the label at i + 1, as for the loss; prompts and padding are neither right nor wrong.
    """
    targets = labels[:, 1:]
    return ((logits[:, :-1].argmax(dim=-1) == targets) & (targets != IGNORED_LABEL)).sum()


def check_finite(loss: float, step: int, rate: float | None) -> None:
    """Raise TrainingFailed when a loss, which is the same on every process, is no number any more.

    `rate` is the learning rate of the step, None where the loss is that of held-out rows.
    """
    if not math.isfinite(loss):
        which = "held-out loss" if rate is None else "loss"
        at = "" if rate is None else f" (learning rate {rate:.3g})"
        raise TrainingFailed(f"the {which} became {loss} at or before step {step}{at}. {DIVERGED_ADVICE}")


def check_weights_finite(model: Any) -> None:
    """Raise TrainingFailed, on every process alike, rather than hand out weights that are no numbers."""
    for name, weight in model.named_parameters():
        if weight.requires_grad and not torch.isfinite(whole(weight)).all():
            raise TrainingFailed(f"{name} is not finite after the last step. {DIVERGED_ADVICE}")
