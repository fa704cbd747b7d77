"""How much memory one training process needs, by part, from the model's shape alone.

A process holds what stays for the whole run (weights, quantisation constants, adapter, optimizer states, the copies of
the gradients that DDP reduces) and what comes and goes within a step. Four moments can be the fullest:

- the loss: the stored activations of all layers, and the logits;
- the last layer's backward: the same activations, and the gradients inside one layer;
- the first layer's backward: all gradients, and the activations and their gradients of one layer;
- the optimizer's step: all gradients, and what the optimizer computes with.

`predict_memory` adds up each and returns the largest. Every term is a count of numbers times the bytes each has; the
counts come from the shape, the bytes from how a program keeps its numbers (`Storage`). No constant was fitted.

What a layer stores for its backward, per token (H hidden, Q query width, K key width, I inner width; c bytes of the
compute type; after Korthikanti et al. 2022, section 4, for today's layers):

    norms           4H each    the input in float32
                    4H each    the normalised input as well, where the norm's weight is trained
    their outputs   cH each    input of q, k, v and of gate, up; one copy for each layer where autocast converts it
    attention       c(Q + 2K)  queries, keys and values after rotation; 3cQ where keys and values are repeated per head
                    cQ         its output, the input of the output projection
                    cT         of a mask of T tokens, where there is one: sdpa makes it of the model's in each layer
    MLP             4cI        gate, silu(gate), up, and their product, the input of the down projection
    adapter         cr each    what the A of each target gives

Where there is a mask, and keys are repeated, model/attention.py tells. Eager attention adds one mask to the scores of
all layers, and stores those.

With activation checkpointing a layer stores its input only (H of the residual stream), and the rest of one layer at a
time is computed again. The logits are there three times at the loss's backward: the log-softmax, the gradient that
reaches it and the one that leaves it (measured: 4,096 x 152,064 float32 logits took 7,131 MiB = 12.0 bytes each). Where
they are made a piece at a time (training/head_loss.py) that is one piece. They are made of trained tokens only, which
all tokens are taken to be here.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tunebook.model.shapes import ModelShape

GIB = 1024**3
# What a CUDA process holds before its first tensor: context, kernels, cuBLAS workspace (0.4 to 0.6 GiB).
CUDA_CONTEXT_BYTES = GIB // 2
QUANTIZED_BLOCK, CONSTANTS_BLOCK = 64, 256  # bitsandbytes: weights that share a scale, scales that share one
FLOAT32, BOOLEAN = 4, 1
# Logits that tunebook makes at once: 0.25 GiB in float32, 0.75 GiB with what the backward makes of them.
LOGITS_AT_ONCE = 2**26


@dataclass(frozen=True)
class Storage:
    """In how many bytes a program keeps each number.

    `quantized` and `constants` are those of a weight of a linear layer in the blocks (0: not quantised), `frozen` of
    any other weight that is not trained, `trained` of a trained weight, with `gradient`, `bucket` (DDP's copy of the
    gradient), `optimizer` (all states) and `step` (what the optimizer computes with). `copies` are what autocast keeps
    of each trained weight in the compute type during the forward. `residual` is the stream between layers, `loss` the
    type of the log-softmax; where it is computed in `loss_chunks` pieces the logits stay in the compute type meanwhile.
    `dequantized` is what one weight needs when it is used.
    """

    compute: float
    residual: float
    frozen: float
    trained: float = FLOAT32
    gradient: float = FLOAT32
    optimizer: float = 2 * FLOAT32
    bucket: float = 0
    step: float = 0
    copies: float = 0
    quantized: float = 0
    constants: float = 0
    dequantized: float = 0
    loss: float = FLOAT32
    loss_chunks: int = 1
    converts_inputs: bool = False


@dataclass(frozen=True)
class Work:
    """What is trained and on what: `adapter` is the number of LoRA parameters (None: all weights are trained).

    A micro-batch has `rows` rows of `length` tokens. `keeps_gradients` says that a step has several micro-batches,
    `logits_at_once` how many logits are made at a time (None: all). `masked` and `repeats_keys` are those of
    `model.attention.Kept`.
    """

    rows: int
    length: int
    adapter: int | None
    rank: int = 0
    checkpointing: bool = True
    keeps_gradients: bool = False
    masked: bool = False
    repeats_keys: bool = False
    eager_attention: bool = False
    logits_at_once: int | None = None

    @property
    def tokens(self) -> int:
        """Positions of a micro-batch, padding included."""
        return self.rows * self.length


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
    gradients = trained * storage.gradient
    kept = gradients if work.keeps_gradients else 0
    layer = count_layer_activation_bytes(shape, storage, work)
    stored = shape.num_layers * (shape.hidden_size * storage.residual if work.checkpointing else layer)
    copies = (linears + shape.vocab_size * shape.hidden_size if work.adapter is None else trained) * storage.copies
    # The last norm and its output, and the mask that all layers were given.
    mask = count_mask_bytes(storage, work)
    around = (FLOAT32 + storage.compute) * shape.hidden_size + mask
    # One layer's backward: the product's gradient and those of its two factors, beside what was stored.
    factors = 3 * storage.compute * inner_width(shape)
    again = layer + mask if work.checkpointing else 0
    dequantized = max(inputs * outputs for _, inputs, outputs in shape.linears) * storage.dequantized
    # Per moment: gradients, activations, logits, workspace.
    moments = {
        "loss": (kept, work.tokens * (stored + around), count_logit_bytes(shape, storage, work), copies),
        "last layer": (kept, work.tokens * (stored + again + factors), 0.0, dequantized),
        "first layer": (gradients, work.tokens * (layer + factors + mask), 0.0, dequantized),
        "optimizer step": (gradients, 0.0, 0.0, trained * storage.step),
    }
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


def count_layer_activation_bytes(shape: ModelShape, storage: Storage, work: Work) -> float:
    """Return the bytes per token that one layer stores for its backward, without activation checkpointing."""
    hidden, compute = shape.hidden_size, storage.compute
    query, key, inner = query_width(shape), key_width(shape), inner_width(shape)
    repeats = work.repeats_keys and key < query
    norms = shape.num_norms * hidden * (2 * FLOAT32 if work.adapter is None else FLOAT32)
    norms += FLOAT32 * (query + key) if shape.has_head_norms else 0
    fed = len(shape.linears) - 2 if storage.converts_inputs else 2  # q, k, v and gate, up; or one copy for each group
    attention = compute * (3 * query if repeats else query + 2 * key) + compute * query
    attention += compute * query if storage.converts_inputs else 0
    attention += compute * work.length if work.masked and not work.eager_attention else 0
    if work.eager_attention:  # for each head: the softmax in float32, its copy in a narrower type, Gemma2's tanh
        scores = FLOAT32 + (compute if compute < FLOAT32 else 0) + (compute if shape.model_type == "gemma2" else 0)
        attention += shape.num_heads * work.length * scores
    adapter = compute * work.rank * len(shape.linears)
    return norms + fed * compute * hidden + attention + 4 * compute * inner + adapter


def count_mask_bytes(storage: Storage, work: Work) -> float:
    """Return the bytes per token of the mask that the model makes for all layers, which checkpointed layers keep."""
    if not (work.masked and work.checkpointing):
        return 0
    return work.length * (storage.compute if work.eager_attention else BOOLEAN)


def count_logit_bytes(shape: ModelShape, storage: Storage, work: Work) -> float:
    """Return the bytes that the logits of a micro-batch take at the fullest moment of the loss."""
    kept = storage.compute if storage.loss_chunks > 1 else 0
    at_once = work.tokens if work.logits_at_once is None else max(1, work.logits_at_once // shape.vocab_size)
    return min(work.tokens, at_once) * shape.vocab_size * (kept + 3 * storage.loss / storage.loss_chunks)


def find_largest(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the largest of ascending `sizes` that fits, or None; where one fits, all smaller ones do."""
    number = bisect_left(sizes, True, key=lambda size: not fits(size))
    return sizes[number - 1] if number else None


def count_linear_parameters(shape: ModelShape) -> int:
    """Return the weights of all linear layers in the blocks, the ones that quantisation takes."""
    return shape.num_layers * sum(inputs * outputs for _, inputs, outputs in shape.linears)


def query_width(shape: ModelShape) -> int:
    """Return heads x head size, the input of the output projection."""
    return next(inputs for name, inputs, _ in shape.linears if name == "o_proj")


def key_width(shape: ModelShape) -> int:
    """Return key heads x head size."""
    for name, _, outputs in shape.linears:
        if name == "k_proj":
            return outputs
        if name == "qkv_proj":
            return (outputs - query_width(shape)) // 2
    raise AssertionError("every known architecture has keys")


def inner_width(shape: ModelShape) -> int:
    """Return the width inside the MLP, the input of the down projection."""
    return next(inputs for name, inputs, _ in shape.linears if name == "down_proj")
