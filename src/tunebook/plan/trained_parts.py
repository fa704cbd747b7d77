"""What a recipe trains, counted from the model's shape: LoRA, layers that are trained whole, rows of new tokens."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from tunebook.model.shapes import ModelShape, count_lora_parameters

# What is trained of the embedding, or of the head: nothing, the rows of some tokens, or all of it.
Share = Literal["none", "rows", "all"]
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
IN_ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
# Keys of `lora` that are counted here, beside those of a plain adapter.
OF_OTHER_PARTS: Final = ("modules_to_save", "trainable_token_indices", "use_dora")
NORMS: Final[Mapping[int, tuple[str, ...]]] = {
    2: ("input_layernorm", "post_attention_layernorm"),
    4: ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
}


@dataclass(frozen=True)
class TrainedParts:
    """Numbers that are trained, `largest` those of the largest tensor, and what that says of embedding and head.

    `widths` are inputs and outputs of the layers with LoRA in one layer of the model.
    """

    number: int
    largest: int
    embedding: Share
    head: Share
    widths: tuple[tuple[int, int], ...] = ()


def widths_of(shape: ModelShape) -> tuple[tuple[int, int], ...]:
    """Return inputs and outputs of all linear layers in one layer of the model."""
    return tuple((inputs, outputs) for _, inputs, outputs in shape.linears)


def all_parts(shape: ModelShape) -> TrainedParts:
    """Return the parts of a full fine-tune."""
    sizes = [inputs * outputs for _, inputs, outputs in shape.linears]
    return TrainedParts(shape.num_parameters, max(*sizes, shape.vocab_size * shape.hidden_size), "all", "all")


def find_trained_parts(
    shape: ModelShape, lora: Mapping[str, Any], rank: int, num_new_tokens: int, assumed: list[str]
) -> TrainedParts:
    """Return what a `lora` section trains, with new tokens; `assumed` gets what only the model itself tells."""
    plain = {name: value for name, value in lora.items() if name not in OF_OTHER_PARTS}
    if count_lora_parameters(shape, plain, rank) is None:
        assumed.append("the adapter is counted as one on all linear layers")
        plain = {}
    saved = list(lora.get("modules_to_save") or [])
    modules = dict(list_modules(shape))
    whole = {path: number for path, number in modules.items() if any(_is_inside(path, name) for name in saved)}
    if unknown := [name for name in saved if not any(_is_inside(path, name) for path in modules)]:
        assumed.append(f"{', '.join(unknown)} of modules_to_save is not known here, and not counted")
    targets = plain.get("target_modules") or "all-linear"
    widths = tuple(
        (inputs, outputs) for name, inputs, outputs in shape.linears
        if (targets == "all-linear" or name in targets) and path_of(0, name) not in whole
    )  # fmt: skip
    magnitudes = sum(outputs for _, outputs in widths) if lora.get("use_dora") else 0
    number = shape.num_layers * (sum(rank * (inputs + outputs) for inputs, outputs in widths) + magnitudes)
    embedding, head, num_rows = _find_rows(shape, lora.get("trainable_token_indices"), num_new_tokens)
    return TrainedParts(
        number=number + sum(whole.values()) + num_rows * shape.hidden_size,
        largest=max([0, *whole.values(), *(rank * max(pair) for pair in widths)]),
        embedding="all" if EMBEDDING in whole else embedding,
        head="all" if HEAD in whole else head,
        widths=widths,
    )


def list_modules(shape: ModelShape) -> Iterator[tuple[str, int]]:
    """Yield every module with weights by the path that transformers gives it, and their number; biases aside."""
    yield from ((EMBEDDING, shape.vocab_size * shape.hidden_size), (HEAD, shape.vocab_size * shape.hidden_size))
    yield "model.norm", shape.hidden_size
    for layer in range(shape.num_layers):
        yield from ((path_of(layer, name), inputs * outputs) for name, inputs, outputs in shape.linears)
        yield from ((f"model.layers.{layer}.{name}", shape.hidden_size) for name in NORMS[shape.num_norms])


def path_of(layer: int, name: str) -> str:
    """Return the path of a linear layer."""
    return f"model.layers.{layer}.{'self_attn' if name in IN_ATTENTION else 'mlp'}.{name}"


def skipped_share(shape: ModelShape, patterns: Sequence[str]) -> float:
    """Return the share of the weights of all linear layers in the blocks that `llm_int8_skip_modules` leaves alone.

    A pattern is the end of a path, or an expression for its beginning up to the end of a name (transformers 5.24,
    quantizers_utils.should_convert_module); one that is no expression is refused elsewhere.
    """
    if not patterns:
        return 0.0
    linear = {path_of(layer, name): inputs * outputs for layer in range(shape.num_layers)
              for name, inputs, outputs in shape.linears}  # fmt: skip
    try:
        begins = [re.compile(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))") for pattern in patterns]
    except re.error:
        return 0.0
    skipped = (path.endswith(tuple(patterns)) or any(one.match(path) for one in begins) for path in linear)
    return sum(number for number, is_left in zip(linear.values(), skipped, strict=True) if is_left) / sum(
        linear.values()
    )


def _is_inside(path: str, name: str) -> bool:
    """Whether a path is that of a module of this name, or of a part of one."""
    return f".{name}." in f".{path}."


def _find_rows(shape: ModelShape, listed: Any, num_new_tokens: int) -> tuple[Share, Share, int]:
    """Return what of embedding and head is trained by rows, and the number of rows; a tied head has the embedding's."""
    by_layer = dict(listed) if isinstance(listed, Mapping) else {"embed_tokens": list(listed or [])}
    if num_new_tokens:  # they take the place of listed ones, in both layers (model.new_tokens.trained_rows)
        layers = ("embed_tokens",) if shape.tied_embeddings else ("embed_tokens", "lm_head")
        by_layer = {layer: range(num_new_tokens) for layer in layers}
    with_rows = {name.rpartition(".")[2] for name, rows in by_layer.items() if rows}
    if with_rows and shape.tied_embeddings:
        with_rows = {"embed_tokens", "lm_head"}
    embedding: Share = "rows" if "embed_tokens" in with_rows else "none"
    head: Share = "rows" if "lm_head" in with_rows else "none"
    return embedding, head, sum(map(len, by_layer.values()))
