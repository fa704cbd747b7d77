"""What draws random numbers in training: each process and micro-batch draws others, and the result depends on them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tunebook.model.shapes import find_config
from tunebook.recipe.schema import Recipe

# GPT-2 writes attn_pdrop, Qwen2 attention_dropout, OPT layerdrop, SmolLM resid_dropout, Falcon hidden_dropout.
DROPPING = re.compile(r"drop(out)?(_rate|_prob|_p)?$")


def random_settings(recipe: Recipe) -> tuple[str, ...]:
    """Return what draws random numbers when this recipe trains: keys of the recipe, and settings of the base's config.

    The config is looked for where the plan finds it: beside local weights, among the known models, in the Hub's cache.
    """
    found = []
    if dropout := (recipe.lora or {}).get("lora_dropout"):
        found.append(f"lora.lora_dropout {dropout:g}")
    if noise := recipe.arguments.get("neftune_noise_alpha"):
        found.append(f"training.neftune_noise_alpha {noise:g}")
    config = find_config(recipe.model.name_or_path, recipe.model.revision) or {}
    found += [f"{key} {value:g} of the base's config.json" for key, value in _dropping(config)]
    return tuple(found)


def random_notes(recipe: Recipe) -> list[str]:
    """Return what the plan says of randomness: nothing where none is drawn."""
    settings = random_settings(recipe)
    if not settings:
        return []
    drawn = f"{' and '.join(settings)} draw{'s' if len(settings) == 1 else ''} other numbers on each rank"
    return [f"{drawn}: the adapter depends on processes and micro-batch"]


def _dropping(config: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _dropping(value)
        elif isinstance(value, float | int) and value and DROPPING.search(key) and not key.startswith("classifier"):
            yield key, float(value)
