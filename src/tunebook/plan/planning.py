"""Making and showing the plan, with whatever is known of the data at that point."""

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tunebook.errors import Problem, Refused, TrainingFailed
from tunebook.launching.command_line import Command
from tunebook.launching.world import World, count_gpus, read_world, world_of
from tunebook.plan.arithmetic import counted
from tunebook.plan.memory_limit import read_said
from tunebook.plan.plan import Plan, build_plan, with_rows, with_split
from tunebook.plan.table import build_console, print_notes, render_plan
from tunebook.recipe.schema import Recipe
from tunebook.system.places import is_local_data

if TYPE_CHECKING:
    from tunebook.data.prepare import PreparedData
    from tunebook.plan.whole_plan import WholePlan


def plan_without_data(recipe: Recipe, world: World, run_dir: str | None) -> Plan:
    """Return the plan before the data is read. Raises Refused where the recipe cannot run in this world."""
    if recipe.chooses_micro_batch or recipe.chooses_checkpointing:
        read_said()  # what cannot be read is refused now, and in a plan, too
    return build_plan(recipe, world, run_dir=run_dir, bf16_supported=_has_bf16(world))


def plan_with_data(plan: Plan, data: "PreparedData", world: World) -> Plan:
    """Return the plan for the prepared data, and show it on rank 0."""
    origins = {"num_train_rows": "prepared data", "num_eval_rows": "prepared data"}
    said, plan = plan.notes, with_split(plan, data.num_train_rows, data.num_eval_rows, origins)
    if world.is_main:
        console = build_console()
        console.print(render_plan(plan))
        print_notes((*plan.notes[len(said) :], *data.notes), console)
        console.print(render_data(data, plan.max_length), soft_wrap=True, markup=False)
    return plan


def prepare_ahead(recipe: Recipe) -> None:
    """Prepare the data of an accepted recipe as a run of it would, and print what became of every row."""
    from tunebook.data.prepare import prepare_data
    from tunebook.data.tokenizer import tokenizer_of

    data = prepare_data(recipe, tokenizer_of(recipe))
    console = build_console()
    print_notes((*recipe.notes, *data.notes), console)
    console.print(render_data(data, recipe.data.max_length), soft_wrap=True, markup=False)
    console.print(f"prepared in {data.folder}", soft_wrap=True, markup=False)


def render_data(data: "PreparedData", max_length: int) -> str:
    """Return what became of every row, on one line: none is lost without being counted."""
    parts = [f"{data.num_train_rows:,} to train", f"{data.num_eval_rows:,} held out"]
    if data.num_duplicate_rows:
        parts.append(f"{data.num_duplicate_rows:,} like an earlier row, left out")
    if data.num_unused_rows:
        parts.append(f"{data.num_unused_rows:,} not drawn from their source")
    if data.num_dropped_rows:
        parts.append(f"{data.num_dropped_rows:,} dropped for their length")
    if data.num_bad_rows:
        parts.append(f"{data.num_bad_rows:,} unusable (quarantine.jsonl)")
    cut = ""
    if data.num_truncated_rows or data.num_dropped_rows:
        cut = f"; data.max_length {max_length} cut {data.num_truncated_rows:,} of these short"
        cut += f" and {data.response_tokens_lost:,} response tokens off in all (longest row: {data.longest_row:,})"
    trained = f"{data.trained_tokens:,} trained tokens per epoch"
    rows = f"{data.num_rows:,} rows" + (f" ({'; '.join(data.forms)})" if data.forms else "")
    if data.num_repeated_rows:
        rows += f" + {data.num_repeated_rows:,} repeated by weight"
    if data.num_split_rows:
        rows += (
            f" + {data.num_split_rows:,} as conversations became several rows (their template rewrites earlier turns)"
        )
    return f"data: {rows} = {', '.join(parts)}{cut}; {trained}; prompts by {data.template}"


def show_start(plan: Plan, world: World) -> None:
    """Print on rank 0, at once, what was started: the notes about the launch first, then one line."""
    if not world.is_main:
        return
    console = build_console()
    print_notes(plan.notes, console)
    group = f"one group over {world.backend}" if world.backend else "no process group"
    text = f"{plan.recipe}: {counted(world.num_processes, 'process')} on {world.device_type}, {group}, "
    console.print(f"{text}{plan.global_batch_size} rows per step; loading", soft_wrap=True, markup=False)


def show_plan(recipe: Recipe, command: Command) -> None:
    """Print the plan of `--plan` on rank 0: for the world that is asked for, or for this machine.

    Raises Refused, after it is printed, with what would make training refuse.
    """
    from tunebook.plan.whole_plan import complete_plan, find_missing  # reads data; not for a recipe with mistakes

    # Nothing is asked of the Hub, which may be out of reach; what this machine has of it is found all the same.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    world = _planned_world(recipe, command)
    plan = plan_without_data(recipe, world, command.run_dir)
    refused_for: tuple[Problem, ...] = ()
    if command.rows is not None:
        plan = with_rows(plan, command.rows, recipe.data.validation, "--rows")
    elif all(is_local_data(source.path) for source in recipe.data.all_sources()) and find_missing(recipe, command):
        try:
            num_rows, forms = _count_usable_rows(recipe)
            origin = f"usable rows ({forms}), before data.max_length"
            plan = with_rows(plan, num_rows, recipe.data.validation, origin)
        except Refused as refused:
            refused_for = refused.problems
    whole = complete_plan(recipe, plan, command, refused_for)
    if world.is_main:
        _print_plan(whole, command.json)
    whole.refuse_errors()


def _print_plan(whole: "WholePlan", as_json: bool) -> None:
    """Print the plan; where standard output takes no more, raise TrainingFailed with the reason."""
    from tunebook.plan.whole_plan_text import show_whole_plan

    try:
        if as_json:
            json.dump(whole.as_dict(), sys.stdout, indent=1)
            print()
        else:
            show_whole_plan(whole)
        sys.stdout.flush()
    except OSError as error:
        # What is still in the buffer would be written, and fail, once more at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise TrainingFailed(f"the plan cannot be written to standard output: {error.strerror}") from error


def _planned_world(recipe: Recipe, command: Command) -> World:
    backend = recipe.arguments.get("ddp_backend")
    if command.num_processes is not None:
        return world_of(command.num_processes, command.device or "cuda", backend)
    if "WORLD_SIZE" not in os.environ and (num_gpus := count_gpus()) > 1:
        # Nothing runs, so plain python on a machine with several GPUs means all of them.
        return world_of(num_gpus, "cuda", backend)
    return read_world(compute_dtype=recipe.model.dtype, ddp_backend=backend)


def _count_usable_rows(recipe: Recipe) -> tuple[int, str]:
    """Read the local data once and return how many rows a run uses, and their forms.

    Raises Refused for what a run would refuse of it before it is tokenised.
    """
    from tunebook.data.rows import scan_usable
    from tunebook.data.sources import open_source

    with TemporaryDirectory() as folder:
        scan = scan_usable(open_source(recipe.data), Path(folder) / "quarantine", recipe.data)
    return scan.num_used_rows + scan.num_repeated_rows, "; ".join(scan.forms)


def _has_bf16(world: World) -> bool:
    """Return whether the GPUs of a world compute in bfloat16; a world that is not there is taken to."""
    if world.device_type == "cpu" or world.launcher == "none":
        return True
    import torch

    return bool(torch.cuda.is_bf16_supported(including_emulation=False))
