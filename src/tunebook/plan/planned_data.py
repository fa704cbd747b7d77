"""The data of a plan: prepared as for a run, and shown as far as it can be where a run would refuse it."""

from dataclasses import replace
from typing import Any

from tunebook.data.overflow import check_truncated_fraction
from tunebook.data.prepare import PreparedData, prepare_data
from tunebook.data.quarantine import check_bad_fraction
from tunebook.errors import Problem, Refused
from tunebook.recipe.schema import Recipe


def prepare_for_plan(recipe: Recipe, tokenizer: Any) -> tuple[PreparedData | None, list[Problem]]:
    """Return the prepared data and why a run would refuse it, if it would; None where nothing can be prepared.

    How many rows may be bad or cut is asked afterwards, so that the rows which are refused for it are shown. Rows that
    `on_overflow: error` refuses are shown as `truncate` would make them, which is what its table tells of them.
    """
    # Neither share is part of what is cached: a run finds what the plan has prepared.
    allowed = _with_data(recipe, max_bad_fraction=1.0, max_truncated_fraction=1.0)
    problems: list[Problem] = []
    try:
        prepared = prepare_data(allowed, tokenizer)
    except Refused as refused:
        problems += refused.problems
        if recipe.data.on_overflow != "error" or not _is_about_length(problems):
            return None, _as_a_run_says(recipe, tokenizer, problems)
        try:
            prepared = prepare_data(_with_data(allowed, on_overflow="truncate"), tokenizer)
        except Refused:
            return None, problems
    for check in (_check_bad, _check_truncated):
        try:
            check(recipe, prepared)
        except Refused as refused:
            problems += refused.problems
    return prepared, problems


def _with_data(recipe: Recipe, **changes: Any) -> Recipe:
    return replace(recipe, data=recipe.data.model_copy(update=changes))


def _is_about_length(problems: list[Problem]) -> bool:
    return problems[0].key == "data.max_length"


def _as_a_run_says(recipe: Recipe, tokenizer: Any, problems: list[Problem]) -> list[Problem]:
    """Return what a run refuses the data for: the shares of the recipe come first there."""
    try:
        prepare_data(recipe, tokenizer)
    except Refused as refused:
        return list(refused.problems)
    return problems


def _check_bad(recipe: Recipe, prepared: PreparedData) -> None:
    bad_rows = iter(prepared.quarantined)
    check_bad_fraction(prepared.num_rows, prepared.num_bad_rows, bad_rows, recipe.data.max_bad_fraction)


def _check_truncated(recipe: Recipe, prepared: PreparedData) -> None:
    num_labelled = prepared.num_train_rows + prepared.num_eval_rows + prepared.num_dropped_rows
    check_truncated_fraction(prepared.truncation_table, num_labelled, recipe.data)
