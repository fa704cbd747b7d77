"""The loss of held-out rows, as a sum that can be added over batches and processes in any split."""

from typing import Any

import torch
from torch.nn.functional import cross_entropy

from tunebook.training.batches import IGNORED_LABEL


def summed_token_loss(logits: Any, labels: Any) -> Any:
    """Return the sum of the cross-entropies (nats) of all labels that count, a float64 scalar tensor.

    `logits` are (rows, tokens, vocabulary) and position i predicts `labels` (rows, tokens) at i + 1. Each token's loss
    is computed in float32 as transformers' causal language models do, and the sum in float64.
    """
    targets = labels[:, 1:].reshape(-1)
    scores = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
    losses = cross_entropy(scores, targets, ignore_index=IGNORED_LABEL, reduction="none")
    return losses.sum(dtype=torch.float64)
