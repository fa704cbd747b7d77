"""The shape of a model from its config alone: parameters, linear layers, what an adapter adds. No weights, no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

# Architectures whose layers are known here: norms of a layer in units of hidden size, norms on heads, and the keys of a
# config that give the attention's four layers or the MLP's three a bias. qwen2 always has one on q, k and v.
ARCHITECTURES: Mapping[str, tuple[int, bool, tuple[str, ...]]] = {
    "qwen2": (2, False, ()),
    "qwen3": (2, True, ("attention_bias",)),
    "llama": (2, False, ("attention_bias", "mlp_bias")),
    "mistral": (2, False, ()),
    "gemma2": (4, False, ("attention_bias",)),
    "phi3": (2, False, ()),
}
# What transformers takes where a config.json leaves a key out, and other architectures take something else.
LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"sliding_window": 4096},
    "qwen3": {"head_dim": 128, "sliding_window": 4096},
}


@dataclass(frozen=True)
class ModelShape:
    """What a decoder-only model is made of. `linears` holds (name, inputs, outputs) for one layer, without the head.

    `num_norms` are the norms of a layer over the hidden size; `has_head_norms` says that heads have their own as well.
    `window` is how many tokens back attention looks in some layer at least; None where it looks at all.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    tied_embeddings: bool
    linears: tuple[tuple[str, int, int], ...]
    num_parameters: int
    source: str
    num_heads: int
    shares_keys: bool  # several heads of the queries have the keys and values of one
    num_norms: int
    has_head_norms: bool
    window: int | None


def find_shape(name_or_path: str, revision: str | None = None) -> ModelShape | None:
    """Return the shape of a local model folder, of a model known here, or of one in the Hub's cache; else None."""
    found = _find_config(name_or_path, revision)
    return build_shape(*found) if found else None


def find_config(name_or_path: str, revision: str | None = None) -> Mapping[str, Any] | None:
    """Return the config of a model from where `find_shape` takes it."""
    found = _find_config(name_or_path, revision)
    return found[0] if found else None


def _find_config(name_or_path: str, revision: str | None) -> tuple[Mapping[str, Any], str] | None:
    local = Path(name_or_path).expanduser() / "config.json"
    if local.is_file():
        return _load_config(local), f"{name_or_path}/config.json"
    known = json.loads(files("tunebook").joinpath("facts/models.json").read_text(encoding="utf-8"))["models"]
    for name in (name_or_path, name_or_path.removesuffix("-Instruct"), name_or_path.removesuffix("-it")):
        if name in known:
            return known[name]["config"], "facts/models.json"
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name_or_path, "config.json", revision=revision)
    except HFValidationError:
        return None
    if not isinstance(cached, str):
        return None
    return _load_config(Path(cached)), "the Hub's cache"


def _load_config(path: Path) -> Mapping[str, Any]:
    """Read a config.json; one that cannot be read has no shape, and loading the model says what is wrong with it."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def build_shape(config: Mapping[str, Any], source: str) -> ModelShape | None:
    """Return the shape that a transformers config describes, or None for an architecture not known here.

    Parameters of a layer: its linear layers, their biases where the architecture has them, its norms. Around them: the
    embedding (twice when the head is not tied to it) and the last norm.
    """
    kind = ARCHITECTURES.get(config.get("model_type", ""))
    if kind is None:
        return None
    norms, head_norms, bias_keys = kind
    config = {**LEFT_OUT.get(config["model_type"], {}), **config}
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    query, key = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    linears = _linears(config["model_type"], hidden, inner, query, key)
    per_layer = sum(inputs * outputs for _, inputs, outputs in linears) + norms * hidden
    per_layer += _count_biases(config, bias_keys, query + 2 * key) + (2 * head_dim if head_norms else 0)
    tied = bool(config.get("tie_word_embeddings"))
    around = config["vocab_size"] * hidden * (1 if tied else 2) + hidden
    return ModelShape(
        model_type=config["model_type"],
        num_layers=layers,
        hidden_size=hidden,
        vocab_size=config["vocab_size"],
        max_positions=config.get("max_position_embeddings", 0),
        tied_embeddings=tied,
        linears=linears,
        num_parameters=layers * per_layer + around,
        source=source,
        num_heads=heads,
        shares_keys=key < query,
        num_norms=norms,
        has_head_norms=head_norms,
        window=_find_window(config),
    )


def _find_window(config: Mapping[str, Any]) -> int | None:
    """Return the window of a config. Qwen writes one down, and uses it only where it says so."""
    if config["model_type"].startswith("qwen") and not config.get("use_sliding_window"):
        return None
    window: int | None = config.get("sliding_window")
    return window


def _count_biases(config: Mapping[str, Any], keys: tuple[str, ...], attention: int) -> int:
    """Return the biases of one layer; `attention` is the width of queries, keys and values together."""
    if config["model_type"] == "qwen2":
        return attention
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    numbers = {"attention_bias": attention + hidden, "mlp_bias": 2 * inner + hidden}
    return sum(numbers[key] for key in keys if config.get(key))


def _linears(kind: str, hidden: int, inner: int, query: int, key: int) -> tuple[tuple[str, int, int], ...]:
    out = (("o_proj", query, hidden), ("down_proj", inner, hidden))
    if kind == "phi3":
        return (("qkv_proj", hidden, query + 2 * key), ("gate_up_proj", hidden, 2 * inner), *out)
    attention = (("q_proj", hidden, query), ("k_proj", hidden, key), ("v_proj", hidden, key))
    return (*attention, ("gate_proj", hidden, inner), ("up_proj", hidden, inner), *out)


def count_lora_parameters(shape: ModelShape, lora: Mapping[str, Any], rank: int) -> int | None:
    """Return the trainable parameters of a LoRA adapter: rank x (inputs + outputs) of every targeted linear layer.

    Source: Hu et al. 2021, section 4.1 (B is outputs x rank, A is rank x inputs). None where the recipe's targets
    can only be told on the model itself (patterns, chosen layers, further modules).
    """
    if set(lora) - {"r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "init_lora_weights", "bias"}:
        return None
    targets = lora.get("target_modules") or "all-linear"
    if lora.get("init_lora_weights") == "mica":  # trains A alone
        return None
    if lora.get("bias", "none") != "none" or (isinstance(targets, str) and targets != "all-linear"):
        return None
    names = {name for name, _, _ in shape.linears}
    if targets != "all-linear" and not set(targets) <= names:
        return None
    chosen = [linear for linear in shape.linears if targets == "all-linear" or linear[0] in targets]
    return shape.num_layers * sum(rank * (inputs + outputs) for _, inputs, outputs in chosen)
