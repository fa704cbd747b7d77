"""How much memory one training process needs, by part, from the model's shape alone.

A process holds what stays for the whole run (weights, quantisation constants, adapter, optimizer states, the copies of
the gradients that DDP reduces) and what comes and goes. Seven moments can be the fullest:

- the loss: the stored activations of all layers, and the logits; of a head that is trained, its gradient as well;
- the last layer's backward: the same activations, and the gradients inside one layer;
- the first layer's backward: all gradients, and the activations and their gradients of one layer;
- the embedding's backward: all gradients, and once more that of an embedding that is trained in part or is the head;
- the optimizer's step: all gradients, and what the optimizer computes with;
- the evaluation: what one layer makes of all tokens of a batch. Answers keep within the positions of a micro-batch,
  which takes as much in training;
- the loss of the evaluation: the hidden states of a batch, and the logits.

`predict_memory` adds up each and returns the largest. Every term is a count of numbers times the bytes each has; the
counts come from the shape, the bytes from how a program keeps its numbers (`Storage`). No constant was fitted.

What a layer stores is in plan/layer_memory.py; with activation checkpointing only its input (H of the residual stream),
and the rest of one layer at a time is computed again. The logits are there three times at the loss's backward: the
log-softmax, the gradient that reaches it and the one that leaves it (measured: 4,096 x 152,064 float32 logits took
7,131 MiB = 12.0 bytes each). Where they are made a piece at a time (training/head_loss.py) that is one piece. They are
made of trained tokens only, which all tokens are taken to be here.

Rows of single tokens (peft's TrainableTokensLayer) are copied into all others at each use: the head keeps that matrix
until its backward, and its gradient is as large.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tunebook.model.shapes import ModelShape
from tunebook.plan.layer_memory import (
    count_dora_bytes,
    count_evaluation_bytes,
    count_layer_activation_bytes,
    count_linear_parameters,
    count_mask_bytes,
    inner_width,
    parts_of,
)
from tunebook.plan.storage import FLOAT32, Storage, Work

GIB = 1024**3
# What a CUDA process holds before its first tensor: context, kernels, cuBLAS workspace (0.4 to 0.6 GiB).
CUDA_CONTEXT_BYTES = GIB // 2
QUANTIZED_BLOCK, CONSTANTS_BLOCK = 64, 256  # bitsandbytes: weights that share a scale, scales that share one
# Logits that tunebook makes at once: 0.25 GiB in float32, 0.75 GiB with what the backward makes of them.
LOGITS_AT_ONCE = 2**26


@dataclass(frozen=True)
class Memory:
    """Bytes of one process at its fullest moment, by part; `moment` says which it is."""

    weights: int
    constants: int
    adapter: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    workspace: int
    moment: str

    @property
    def total(self) -> int:
        """All parts together, without the context of a GPU."""
        parts = (self.weights, self.constants, self.adapter, self.gradients, self.optimizer)
        return sum(parts) + self.activations + self.logits + self.workspace


def predict_memory(shape: ModelShape, storage: Storage, work: Work) -> Memory:
    """Return what one process holds at its fullest moment, in bytes; the module's text has the arithmetic."""
    trained, linears = shape.num_parameters if work.adapter is None else work.adapter, count_linear_parameters(shape)
    if work.adapter is None:
        weights, constants = trained * storage.trained, 0.0
    else:
        in_layers = linears * (storage.quantized or storage.frozen)
        weights = in_layers + (shape.num_parameters - linears) * storage.frozen
        constants = linears * storage.constants
    moments = find_moments(shape, storage, work, trained)
    held, activations, logits, workspace = moments[moment := max(moments, key=lambda name: sum(moments[name]))]
    return Memory(
        weights=round(weights),
        constants=round(constants),
        adapter=round(0 if work.adapter is None else trained * storage.trained),
        gradients=round(held + trained * storage.bucket),
        optimizer=round(trained * storage.optimizer),
        activations=round(activations),
        logits=round(logits),
        workspace=round(workspace),
        moment=moment,
    )


def find_moments(
    shape: ModelShape, storage: Storage, work: Work, trained: int
) -> dict[str, tuple[float, float, float, float]]:
    """Return bytes of gradients, activations, logits and workspace for each moment that can be the fullest."""
    parts = parts_of(shape, work)
    table = shape.vocab_size * shape.hidden_size
    gradients = trained * storage.gradient
    kept = gradients if work.keeps_gradients else 0
    after_head = max(kept, table * storage.gradient if parts.head == "all" else 0)
    layer = count_layer_activation_bytes(shape, storage, work)
    whole = sum(inputs * outputs for inputs, outputs in parts.widths) * storage.compute
    whole *= work.dora and work.dropout and (storage.quantized > 0 or storage.compute < FLOAT32)
    stored = shape.num_layers * (shape.hidden_size * storage.residual if work.checkpointing else layer)
    weights = whole if work.checkpointing else shape.num_layers * whole
    # The last norm and its output, and the mask that all layers were given.
    mask = count_mask_bytes(storage, work)
    around = (FLOAT32 + storage.compute) * shape.hidden_size + mask
    # One layer's backward: the product's gradient and those of its two factors, beside what was stored.
    factors = 3 * storage.outputs * inner_width(shape)
    again = layer + mask if work.checkpointing else 0
    used = max(inputs * outputs for _, inputs, outputs in shape.linears) * storage.dequantized
    used = max(used, count_dora_bytes(storage, parts) if work.dora else 0)
    logits, at_loss = count_loss_bytes(shape, storage, work, trained)
    copied = storage.compute if parts.embedding == "rows" else storage.gradient
    again_table = table * copied if parts.embedding == "rows" or (shape.tied_embeddings and parts.head == "all") else 0
    evaluated = work.evaluated * work.evaluated_length
    of_layer = evaluated * count_evaluation_bytes(shape, storage, work)
    in_step = trained * storage.step + parts.largest * storage.step_of_largest
    return {
        "loss": (kept, work.tokens * (stored + around) + weights, logits, at_loss),
        "last layer": (after_head, work.tokens * (stored + again + factors) + weights, 0.0, used),
        "first layer": (gradients, work.tokens * (layer + factors + mask) + whole, 0.0, used),
        "embedding": (gradients, 0.0, 0.0, again_table),
        "optimizer step": (gradients, 0.0, 0.0, in_step),
        "evaluation": (0.0, of_layer, 0.0, used),
        "loss of the evaluation": (0.0, *count_evaluation_loss_bytes(shape, storage, work, evaluated), 0.0),
    }


def count_loss_bytes(shape: ModelShape, storage: Storage, work: Work, trained: int) -> tuple[float, float]:
    """Return the bytes of logits at the loss, and of what autocast and a trained head hold or make beside them.

    autocast keeps its copies until the forward ends, and after it those are left that the backward needs: the head's,
    and without activation checkpointing all. A trained head makes its gradient when one of the three that the logits
    take is left. In float32 that of a further piece is there beside the sum; in a narrower type the sum is, and then
    its float32 form.
    """
    head, table = parts_of(shape, work).head, shape.vocab_size * shape.hidden_size
    logits = count_logit_bytes(shape, storage, work, work.tokens)
    copies = (count_linear_parameters(shape) + table if work.adapter is None else trained) * storage.copies
    merged = gradient = of_head = 0.0
    if head == "rows":
        gradient = merged = table * storage.compute
    elif head == "all":
        in_pieces = work.logits_at_once is not None and work.tokens * shape.vocab_size > work.logits_at_once
        further = storage.compute if storage.compute < FLOAT32 else FLOAT32 * in_pieces
        gradient, of_head = table * (storage.gradient + further), table * storage.copies
    left = of_head if work.checkpointing else copies
    return logits, merged + max(copies, left + gradient - 2 / 3 * logits)


def count_evaluation_loss_bytes(shape: ModelShape, storage: Storage, work: Work, tokens: int) -> tuple[float, float]:
    """Return the bytes of hidden states and logits of so many tokens, without gradients.

    The logits are there as they are made, in float32 where that is another type, and as the log-softmax.
    """
    states = tokens * shape.hidden_size * (storage.residual + storage.compute)
    narrow = storage.compute if storage.compute < FLOAT32 else 0
    return states, _logit_tokens(shape, work, tokens) * shape.vocab_size * (narrow + 2 * storage.loss)


def _logit_tokens(shape: ModelShape, work: Work, tokens: int) -> int:
    """Return of how many tokens the logits are made at once."""
    at_once = tokens if work.logits_at_once is None else max(1, work.logits_at_once // shape.vocab_size)
    return min(tokens, at_once)


def count_logit_bytes(shape: ModelShape, storage: Storage, work: Work, tokens: int) -> float:
    """Return the bytes that the logits of so many tokens take at the fullest moment of the loss."""
    kept = storage.compute if storage.loss_chunks > 1 else 0
    of_each = kept + 3 * storage.loss / storage.loss_chunks
    return _logit_tokens(shape, work, tokens) * shape.vocab_size * of_each


def find_largest(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the largest of ascending `sizes` that fits, or None; where one fits, all smaller ones do."""
    number = bisect_left(sizes, True, key=lambda size: not fits(size))
    return sizes[number - 1] if number else None
