"""Which attention a model can have: what transformers chooses by itself is said, what it cannot do is refused.

And what a kind of attention keeps of a micro-batch, which is what the memory plan goes by.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tunebook.errors import Problem
from tunebook.model.shapes import ModelShape
from tunebook.recipe.schema import Recipe

# These compute scores without the cap that Gemma2 puts on them (50 tanh(score / 50); Gemma Team 2024, section 2).
CANNOT_CAP = ("sdpa",)


class Kept(NamedTuple):
    """What attention has of a micro-batch beside its queries, keys and values.

    `masked`: a mask of each row's positions against each other. `repeats_keys`: a copy of keys and values for each head
    of the queries, where several share one.
    """

    masked: bool
    repeats_keys: bool


def spares_masks(shares_keys: bool, device_type: str, compute_dtype: str) -> bool:
    """Return whether sdpa is better off without a mask that it does not need.

    Without one transformers leaves it to sdpa that heads share keys (integrations/sdpa_attention.py), which on CUDA
    flash attention's kernel can alone (torch, scaled_dot_product_attention, enable_gqa). For float32, and before
    compute capability 8, there is none, and all scores would be made and kept; beside a mask, keys are repeated and
    the memory-efficient kernel serves. A GPU that trains in bfloat16 has flash attention's.
    """
    return device_type != "cuda" or not shares_keys or compute_dtype == "bfloat16"


def kept_for_attention(
    attention: str, shape: ModelShape, length: int, *, joined: bool = False, spared: bool = True
) -> Kept:
    """Return what attention keeps of rows of `length` tokens, padded on the right, or `joined` to one of that length.

    `training.row_masks` spares sdpa the mask of padded rows where `spared` (`spares_masks`), but not that of joined
    ones, nor that of rows which reach the window of a model. A compiled model is left to transformers, so none is
    `spared` there (masking_utils._ignore_causal_mask_sdpa), and it repeats keys beside a mask
    (integrations/sdpa_attention.py). Eager attention always has a mask. Flash attention has none, and flex one of
    blocks, which is small; that repeats keys where the number of heads is no power of two
    (integrations/flex_attention.py).
    """
    if attention == "sdpa":
        reaches_window = shape.window is not None and length >= shape.window
        masked = joined or reaches_window or not spared
        return Kept(masked, repeats_keys=masked)
    if attention == "flex_attention":
        return Kept(masked=False, repeats_keys=shape.num_heads.bit_count() != 1)
    return Kept(masked=attention == "eager", repeats_keys=attention == "eager")


def caps_scores(config: Mapping[str, Any]) -> bool:
    """Whether a model bounds its attention scores by a tanh, as its transformers config tells."""
    cap: Any = config.get("attn_logit_softcapping", config.get("model_type") == "gemma2")
    return bool(cap)


def check_attention(recipe: Recipe, config: Mapping[str, Any] | None) -> list[Problem]:
    """Return why the attention that the recipe names cannot serve the model; empty where it can, or is not known."""
    attention = recipe.model.attn_implementation
    if attention not in CANNOT_CAP or not caps_scores(config or {}):
        return []
    message = f"{attention} cannot cap attention scores, as {recipe.model.name_or_path} does"
    fix = "Remove it (eager is used then), or use flash_attention_2 on GPUs"
    return [Problem(message, fix, recipe.path, "model.attn_implementation")]


def attention_notes(recipe: Recipe, config: Mapping[str, Any] | None) -> list[str]:
    """Return what is chosen where the recipe names no attention and the model cannot have the usual one."""
    if recipe.model.attn_implementation is not None or not caps_scores(config or {}):
        return []
    return ["attention is eager, as the model caps its scores and sdpa cannot; flash_attention_2 can, on GPUs"]


def find_position_problems(recipe: Recipe, architecture: Any, longest_row: int, micro_batch: int) -> list[Problem]:
    """Return why rows up to `longest_row` tokens cannot be trained with this transformers config; empty where they can.

    They are longer than the positions that the model knows, or than a micro-batch may mix.
    """
    positions = getattr(architecture, "max_position_embeddings", None)
    longest = min(longest_row, recipe.data.max_length)
    if positions is not None and longest > positions:
        message = f"rows of {longest} tokens, and {recipe.model.name_or_path} has {positions} positions"
        return [Problem(message, f"Set data.max_length: {positions}", recipe.path, "data.max_length")]
    return check_rope(recipe, getattr(architecture, "rope_parameters", None), longest_row, micro_batch)


def check_rope(recipe: Recipe, rope: Mapping[str, Any] | None, longest_row: int, micro_batch: int) -> list[Problem]:
    """Return why rows of several lengths cannot share a micro-batch of a model with long-rope.

    `rope` is the model's rope_parameters. Past the positions of its first training such a model turns every row of the
    micro-batch by other frequencies (transformers, modeling_rope_utils.dynamic_rope_update), so that a short row's
    result would depend on its neighbours: on the size of the micro-batch and on the number of processes.
    """
    given = rope or {}
    original = given.get("original_max_position_embeddings")
    longest = min(longest_row, recipe.data.max_length)
    largest_batch = max(micro_batch, recipe.arguments.get("per_device_eval_batch_size", micro_batch))
    if given.get("rope_type") != "longrope" or not original or longest <= original or largest_batch == 1:
        return []
    message = f"rows of {longest} tokens, and past {original} long-rope changes all rows of a micro-batch"
    fix = f"Set data.max_length: {original}, or per_device_train_batch_size and per_device_eval_batch_size: 1"
    return [Problem(message, fix, recipe.path, "data.max_length")]
