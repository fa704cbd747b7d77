"""The base of a run as it was published: unquantised, in its own type."""

from typing import Any

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from tunebook.errors import Problem, Refused
from tunebook.model.model import first_words, load_architecture
from tunebook.recipe.schema import Recipe
from tunebook.system.places import is_local, local_path

KEY = "model.name_or_path"


def check_unquantised(recipe: Recipe) -> None:
    """Raise Refused where the base cannot be found, or was itself published quantised. No weights are read."""
    settings = getattr(load_architecture(recipe), "quantization_config", None)
    if settings is None:
        return
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    message = f"{recipe.model.name_or_path} is published quantised{f' ({method})' if method else ''}"
    fix = (
        "An adapter is never merged into such weights: the sum would be rounded to the few values of its block once "
        "more. Use the adapter on this base as it is, or train on the unquantised model"
    )
    raise Refused(Problem(message, fix, recipe.path, KEY))


def load_published(recipe: Recipe) -> Any:
    """Return the base on the CPU, its weights in the type they were published in and mapped from their files.

    Raises Refused where it cannot be loaded or lacks weights.
    """
    name = recipe.model.name_or_path
    try:
        base, loading = AutoModelForCausalLM.from_pretrained(
            str(local_path(name)) if is_local(name) else name,
            revision=recipe.model.revision or "main",
            dtype="auto",
            attn_implementation=recipe.model.attn_implementation,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise Refused(Problem(f"{name} cannot be loaded: {first_words(error)}", where=recipe.path, key=KEY)) from error
    if missing := sorted(loading["missing_keys"]):
        message = f"{name} lacks {len(missing)} weights, {missing[0]} first; they would be random"
        raise Refused(Problem(message, "Give a complete causal language model", recipe.path, KEY))
    return base.eval()
