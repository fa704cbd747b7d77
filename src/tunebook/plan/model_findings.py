"""What the start of training would refuse of a model, found for `--plan` without its weights; the rest is unknown."""

import copy
from typing import Any

from tunebook.errors import Problem, Refused
from tunebook.model.shapes import ModelShape, count_lora_parameters, find_config
from tunebook.plan.findings import Finding, as_errors, find_shape_problems
from tunebook.plan.plan import Plan
from tunebook.recipe.schema import Recipe
from tunebook.system.places import is_local

# Random weights tell as much of packing as the trained ones. So many are drawn in about a second, and take 1 GB.
MOST_DRAWN = 250_000_000


def find_model_findings(
    recipe: Recipe, plan: Plan, shape: ModelShape | None, tokenizer: Any, longest_row: int
) -> tuple[list[Finding], list[str]]:
    """Return what is wrong or worth knowing of this recipe on the model with rows up to `longest_row` tokens.

    The second list is what only loading the model tells.
    """
    from tunebook.model.model import find_model_problems

    # Where the adapter's layers can be counted they are known to exist, and to be ones that peft adapts.
    is_known = (
        shape is not None and recipe.lora is not None and count_lora_parameters(shape, recipe.lora, 1) is not None
    )
    problems, notes = find_model_problems(recipe, plan, tokenizer, longest_row, with_adapter=not is_known)
    if problems:
        return as_errors(problems), []
    if shape is not None and not is_local(recipe.model.name_or_path):
        problems = find_hub_problems(recipe, shape, tokenizer, longest_row)
    unknown = []
    if recipe.data.packing and not problems:
        packing = find_packing_problems(recipe)
        if packing is None:
            unknown.append("packing: whether this model keeps joined rows apart is checked when it is loaded")
        problems += packing or []
    return [*as_errors(problems), *(Finding("note", note, "") for note in notes)], unknown


def find_hub_problems(recipe: Recipe, shape: ModelShape, tokenizer: Any | None, longest_row: int = 0) -> list[Problem]:
    """Return what can be told of a model on the Hub that is not on this machine, from what is known of its config.

    Its modules are built, without weights, only where the shape alone does not tell what the adapter reaches.
    """
    problems = find_shape_problems(recipe, shape, tokenizer, longest_row)
    config = find_config(recipe.model.name_or_path, recipe.model.revision)
    if problems or not config or recipe.lora is None or count_lora_parameters(shape, recipe.lora, 1) is not None:
        return problems
    from transformers import AutoConfig

    from tunebook.model.base_checks import find_lora_problems
    from tunebook.model.model import build_hollow
    from tunebook.system.quiet import quiet_libraries

    with quiet_libraries():
        return find_lora_problems(recipe, build_hollow(recipe, AutoConfig.for_model(**config)))


def find_packing_problems(recipe: Recipe) -> list[Problem] | None:
    """Return why the rows of this recipe cannot be joined, from a model of random weights on the CPU.

    None where that cannot be told: a model that is large or not here, or an attention that needs a GPU.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from tunebook.model.model import build_hollow, load_architecture
    from tunebook.system.quiet import quiet_libraries
    from tunebook.training.packing import check_rows_apart

    if recipe.model.attn_implementation not in (None, "eager", "sdpa"):
        return None
    try:
        with quiet_libraries(), torch.random.fork_rng(devices=[]):
            architecture = load_architecture(recipe)
            if build_hollow(recipe, architecture).num_parameters() > MOST_DRAWN:
                return None
            attention = recipe.model.attn_implementation
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(architecture), dtype=torch.float32, attn_implementation=attention
            )
    except Refused:
        return None
    try:
        check_rows_apart(recipe, model, "float32")
    except Refused as refused:
        return list(refused.problems)
    return []
