"""Attention masks from what is known of a micro-batch, where transformers would ask the tensors.

To spare a mask transformers looks whether there is padding, or whether positions start again: values the host has to
wait for, in every micro-batch. Here it is known. Padding on the right needs no mask at all under causal attention: no
token sees what comes after it, and what a padding position gives is a label of nobody. Joined rows do need one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    and_masks,
    packed_sequence_mask_function,
)

from tunebook.model.attention import spares_masks

MakeMask = Callable[..., Any]
# Without a mask both take the causal one as known. Eager attention has no such way, and flex makes a mask of blocks.
CAUSAL_BY_THEMSELVES = ("sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")
JOINS_BY_MASK = "sdpa"


class KnownRows(NamedTuple):
    """The micro-batch that a model is run on: rows padded on the right, or joined ones with their positions.

    `spared`: whether padded rows are better off without a mask (`model.attention.spares_masks`).
    """

    positions: Any | None
    spared: bool


_known: ContextVar[KnownRows | None] = ContextVar("known rows", default=None)


@contextmanager
def known_rows(attention: str | None, inputs: dict[str, Any], spared: bool = True) -> Iterator[dict[str, Any]]:
    """Make the masks of a model with this kind of attention from what `pad_right` and `join_rows` promise of `inputs`.

    Gives the inputs to run it on inside the block. Not for a compiled model, nor for rows that are padded on the left.
    """
    positions = inputs.get("position_ids")
    if positions is not None:
        if attention != JOINS_BY_MASK:
            yield inputs
            return
        # With a mask of its own transformers does not look at the positions; below, theirs takes its place.
        inputs = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
    token = _known.set(KnownRows(positions, spared))
    try:
        yield inputs
    finally:
        _known.reset(token)


def _without_asking(make_mask: MakeMask) -> MakeMask:
    """Return transformers' function for one kind of attention, which inside `known_rows` asks no tensor.

    `allow_is_causal_skip` is how a model says that its mask is the causal one and nothing more.
    """

    def made(**given: Any) -> Any:
        rows = None if torch.compiler.is_compiling() else _known.get()
        if rows is None or given["q_length"] != given["kv_length"]:
            return make_mask(**given)
        never_spared = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        if rows.positions is None:
            if not rows.spared:
                return make_mask(**{**given, **never_spared})
            return make_mask(**{**given, "attention_mask": None} if given.get("allow_is_causal_skip", True) else given)
        if given["q_length"] != rows.positions.shape[-1]:  # of something else than the tokens, such as patches of them
            return make_mask(**given)
        row_numbers = (rows.positions == 0).cumsum(dim=-1)
        mask = and_masks(given["mask_function"], packed_sequence_mask_function(row_numbers))
        return make_mask(**{**given, **never_spared, "mask_function": mask, "attention_mask": None})

    return made


for _attention in CAUSAL_BY_THEMSELVES:
    if _attention in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(_attention, _without_asking(ALL_MASK_ATTENTION_FUNCTIONS[_attention]))


def attention_of(model: Any) -> str | None:
    """Return the kind of attention of a model, as transformers names it."""
    kind: str | None = getattr(model.config.get_text_config(), "_attn_implementation", None)
    return kind


def spares_masks_of(model: Any, compute_dtype: str) -> bool:
    """Return whether a model's padded rows are better off without a mask where it is now."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    shares_keys = getattr(config, "num_key_value_heads", heads) != heads
    return spares_masks(shares_keys, model.get_input_embeddings().weight.device.type, compute_dtype)
