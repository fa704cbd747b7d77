"""How much memory one layer of a model takes while it is trained, or only run.

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
    dropout         (c + m)I   of each LoRA layer's input I, in place of the inputs above: what is left of it, and the
                               mask, which takes 1 byte on a GPU and a number of the input's type on a CPU
    DoRA            2cO each   the outputs O of the base and of the adapter

DoRA computes with whole weights (peft 0.21, tuners/lora/dora.py): an identity of the input's width, once in float32 and
once more where autocast converts it; then four matrices of the weight's size. With dropout it keeps each weight, too.
4-bit layers return the type that they were given: after an embedding that is trained whole, and after DoRA's float32
magnitudes, gate, silu(gate) and up are in float32.

Where there is a mask, and keys are repeated, model/attention.py tells. Eager attention adds one mask to the scores of
all layers, and stores those.
"""

from tunebook.model.shapes import ModelShape
from tunebook.plan.storage import BOOLEAN, FLOAT32, Storage, Work
from tunebook.plan.trained_parts import TrainedParts, all_parts, widths_of


def count_layer_activation_bytes(shape: ModelShape, storage: Storage, work: Work) -> float:
    """Return the bytes per token that one layer stores for its backward, without activation checkpointing."""
    hidden, compute = shape.hidden_size, storage.compute
    query, key, inner = query_width(shape), key_width(shape), inner_width(shape)
    repeats = work.repeats_keys and key < query
    norms = shape.num_norms * hidden * (2 * FLOAT32 if work.adapter is None else FLOAT32)
    norms += FLOAT32 * (query + key) if shape.has_head_norms else 0
    fed = len(shape.linears) - 2 if storage.converts_inputs else 2  # q, k, v and gate, up; or one copy for each group
    widths = parts_of(shape, work).widths
    if work.dropout:
        linears = sum(inputs for inputs, _ in widths) * (compute + storage.mask)
    else:
        linears = compute * (fed * hidden + inner + (query if storage.converts_inputs else 0))
    if work.dora:
        linears += sum(outputs for _, outputs in widths) * (compute + storage.outputs)
    attention = compute * (3 * query if repeats else query + 2 * key) + compute * query
    attention += compute * work.length if work.masked and not work.eager_attention else 0
    if work.eager_attention:
        attention += shape.num_heads * work.length * _eager_score_bytes(shape, storage)
    adapter = compute * work.rank * len(shape.linears)
    return norms + linears + attention + 3 * storage.outputs * inner + adapter


def _eager_score_bytes(shape: ModelShape, storage: Storage) -> float:
    """Return the bytes for a score of a head: the softmax in float32, its copy in a narrower type, Gemma2's tanh."""
    compute = storage.compute
    return FLOAT32 + (compute if compute < FLOAT32 else 0) + (compute if shape.model_type == "gemma2" else 0)


def count_evaluation_bytes(shape: ModelShape, storage: Storage, work: Work) -> float:
    """Return the bytes per token of a layer without gradients: its input, that of its second half, and what that takes.

    The second input is there as it is and normed. MLP: silu(gate), and up, of which LoRA has three copies for a moment.
    Eager attention: the scores twice.
    """
    mlp = inner_width(shape) * storage.outputs * (3 if work.adapter is None else 4)
    scores = 2 * shape.num_heads * work.evaluated_length * _eager_score_bytes(shape, storage)
    fullest = max(mlp, scores) if work.eager_attention else mlp
    return shape.hidden_size * (2 * storage.residual + storage.compute) + fullest


def count_mask_bytes(storage: Storage, work: Work) -> float:
    """Return the bytes per token of the mask that the model makes for all layers, which checkpointed layers keep."""
    if not (work.masked and work.checkpointing):
        return 0
    return work.length * (storage.compute if work.eager_attention else BOOLEAN)


def count_dora_bytes(storage: Storage, parts: TrainedParts) -> float:
    """Return what DoRA computes with in the largest of its layers."""
    converted = storage.compute if storage.compute < FLOAT32 else 0
    kept = converted or FLOAT32  # the identity, for the gradient of A
    return max(
        max(inputs**2 * (FLOAT32 + converted) + inputs * outputs * storage.compute,
            inputs**2 * kept + inputs * outputs * (storage.compute + 3 * storage.outputs))
        for inputs, outputs in parts.widths
    )  # fmt: skip


def parts_of(shape: ModelShape, work: Work) -> TrainedParts:
    """Return what is trained: all, what was found, or an adapter on all linear layers."""
    if work.adapter is None:
        return all_parts(shape)
    return work.parts or TrainedParts(work.adapter, 0, "none", "none", widths_of(shape))


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
