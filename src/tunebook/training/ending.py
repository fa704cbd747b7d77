"""How a run ends for the person who started it: what was learned, where it is, and what to type next."""

import shlex
from pathlib import Path
from typing import Any

from tunebook.data.prepare import PreparedData
from tunebook.errors import Refused
from tunebook.launching.command_line import command_name
from tunebook.launching.process_group import refuse_together
from tunebook.launching.world import World
from tunebook.plan.plan import Plan
from tunebook.plan.table import build_console, print_notes
from tunebook.recipe.schema import Recipe
from tunebook.runs.folder import find_finished, is_completed
from tunebook.runs.past import read_past_runs
from tunebook.runs.receipts import compare_with_receipt, receipt_path
from tunebook.training.collectives import from_rank_0
from tunebook.training.outcome import RunResult
from tunebook.training.result import render_result_table
from tunebook.training.starting import build_identity


def show_result(result: RunResult, plan: Plan, world: World) -> None:
    """Print on rank 0 the table of before and after, where the adapter is, and the next command."""
    if not world.is_main:
        return
    console = build_console()
    console.print(render_result_table(result), markup=False, soft_wrap=True)
    print_notes((*result.notes, *_compare_with_receipt(result.run.recipe, plan)), console)
    console.print(_render_places(plan.adapter_dir, plan.run_dir), markup=False, soft_wrap=True)


def _compare_with_receipt(recipe: Recipe, plan: Plan) -> list[str]:
    """Return what the run is not that the receipt of its recipe promises, or that there is none that can be read."""
    [run] = read_past_runs([plan.run_dir])
    try:
        return compare_with_receipt(receipt_path(recipe.path), run)
    except Refused as refused:  # all is trained and written
        return [problem.render() for problem in refused.problems]


def is_finished(  # noqa: PLR0913, PLR0917 - what a run is made of
    recipe: Recipe, plan: Plan, world: World, tokenizer: Any, data: PreparedData, fresh: bool
) -> bool:
    """Return whether a run that would end with this very result has been trained to the end in the run folder.

    Rank 0 decides for all and says so, since only its machine need have the folder. `fresh` trains again in any case.
    """
    found = None
    with refuse_together():
        if world.is_main and not fresh and is_completed(Path(plan.run_dir)):
            found = find_finished(plan, build_identity(recipe, plan, tokenizer, data))
    if world.is_main and found:
        console = build_console()
        loss = found.get("eval_loss")
        held_out = f", held-out loss {loss:.4f}" if isinstance(loss, float) else ""
        text = f"This recipe has finished already: {found['num_optimizer_steps']} steps{held_out}. --fresh repeats it."
        console.print(text, markup=False, soft_wrap=True)
        console.print(_render_places(plan.adapter_dir, plan.run_dir), markup=False)
    return bool(from_rank_0(found is not None))


def _render_places(adapter_dir: str, run_dir: str) -> str:
    return f"adapter: {Path(adapter_dir)}\nnext:    {command_name()} chat {shlex.quote(str(Path(run_dir)))}"
