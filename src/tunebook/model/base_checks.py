"""Why a recipe cannot train a base, as far as its config, its modules and its tokenizer tell: no weights are read."""

from dataclasses import replace
from typing import Any

from tunebook.errors import Problem
from tunebook.model.lora_reach import check_lora_reach
from tunebook.model.lora_targets import check_lora_names
from tunebook.model.shares import check_quantisation
from tunebook.recipe.schema import Recipe


def find_base_problems(recipe: Recipe, architecture: Any, hollow: Any, tokenizer: Any) -> list[Problem]:
    """Return why this recipe cannot train the model of this transformers config; `hollow` has no weights."""
    problems = _vocabulary_problems(recipe, hollow, tokenizer) + _precision_problems(recipe, architecture)
    problems += _architecture_problems(recipe, architecture) + _router_problems(recipe, architecture)
    return problems + find_lora_problems(recipe, hollow)


def find_lora_problems(recipe: Recipe, hollow: Any) -> list[Problem]:
    """Return why the adapter of this recipe cannot be had on a model that has no weights as yet."""
    if recipe.lora is None:
        return []
    problems = check_lora_names(hollow, recipe.lora, recipe.path)
    if not problems:
        problems = check_lora_reach(hollow, recipe.lora, recipe.path, bool(recipe.model.add_special_tokens))
    if recipe.quantization is not None:
        found = check_quantisation(hollow, recipe.quantization, recipe.lora)
        problems += [replace(problem, where=recipe.path) for problem in found]
    return problems


def _architecture_problems(recipe: Recipe, architecture: Any) -> list[Problem]:
    """Refuse a model that was saved for another task: read as a causal one, it would look at what it has to predict."""
    other = ("MaskedLM", "Classification", "QuestionAnswering", "NextSentence", "PreTraining", "MultipleChoice")
    saved = next(iter(getattr(architecture, "architectures", None) or []), "")
    if not any(task in saved for task in other):
        return []
    message = f"{recipe.model.name_or_path} is a {saved}, no causal language model"
    return [Problem(message, "Give a model that generates text", recipe.path, "model.name_or_path")]


def _router_problems(recipe: Recipe, architecture: Any) -> list[Problem]:
    """Refuse a model that adds a loss of its own to each micro-batch: how rows are laid out would change the result.

    It balances the experts of a mixture by what their router gave the rows of one micro-batch, and is no sum over rows.
    """
    if not getattr(architecture.get_text_config(), "output_router_logits", False):
        return []
    message = f"{recipe.model.name_or_path} adds a loss of its router, which depends on the rows of a micro-batch"
    fix = "Give a copy of it whose config.json says output_router_logits: false"
    return [Problem(message, fix, recipe.path, "model.name_or_path")]


def _vocabulary_problems(recipe: Recipe, hollow: Any, tokenizer: Any) -> list[Problem]:
    num_rows = hollow.get_input_embeddings().weight.shape[0]
    added = set(recipe.model.add_special_tokens or ())
    largest = max(number for token, number in tokenizer.get_vocab().items() if token not in added)
    if largest < num_rows:
        return []
    message = f"the tokenizer has ids up to {largest}, the embedding of {recipe.model.name_or_path} has {num_rows} rows"
    fix = "Give the tokenizer and the weights of one model; new tokens are named in model.add_special_tokens"
    return [Problem(message, fix, recipe.path, "model.name_or_path")]


def _precision_problems(recipe: Recipe, architecture: Any) -> list[Problem]:
    if recipe.lora is not None:
        return []
    if recipe.quantization is not None:
        message = "quantised weights cannot be trained themselves"
        return [Problem(message, "Add a lora section, or drop this one", recipe.path, "quantization")]
    if getattr(architecture, "quantization_config", None) is not None:
        message = f"{recipe.model.name_or_path} is saved quantised, and such weights cannot be trained themselves"
        return [Problem(message, "Add a lora section", recipe.path, "model.name_or_path")]
    return []
