"""`tunebook repro`: the run in a folder that someone else left, started again here."""

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tunebook.errors import EXIT_DONE, Problem, Refused
from tunebook.launching.command import DeviceType
from tunebook.launching.world import World, count_gpus, world_of
from tunebook.plan.plan import Plan
from tunebook.plan.planning import plan_without_data
from tunebook.plan.table import build_console
from tunebook.recipe.reading import load_recipe, placed_in
from tunebook.recipe.schema import AUTO, Recipe
from tunebook.runs.differences import Difference, compare_results, find_other_contents, find_surroundings
from tunebook.runs.folder import check_folder, read_begun
from tunebook.runs.past import PastRun, read_past_runs
from tunebook.system.places import is_local

COMMIT = re.compile(r"[0-9a-f]{40}")
PROGRAMS = ("finetune.py", "train_ddp.py")


@dataclass(frozen=True)
class Again:
    """A past run, and the one here that is to be the same: its recipe, its world and its plan; `words` start it."""

    past: PastRun
    recipe: Recipe
    world: World
    plan: Plan
    words: tuple[str, ...]


def reproduce(  # noqa: PLR0913, PLR0917 - one for each option
    run_dir: str, overrides: Sequence[str], target: str | None, num_processes: int | None, anyway: bool, dry_run: bool
) -> int:
    """Say what differs from the run in a folder, start it again in another one, and say whether the result is the same.

    Returns the exit code of the run, 0 for a dry run. Raises Refused, with nothing started, where the run cannot be had
    here: its recipe, base or data are not found, or are others and `anyway` does not allow it. The folder is only read.
    """
    again = prepare_again(run_dir, overrides, target, num_processes)
    others = say_differences(again)
    if others and not anyway:
        fix = "Add --anyway to start it all the same"
        raise Refused([Problem(f"would not be the same run: {other}", fix, run_dir) for other in others])
    if dry_run:
        return EXIT_DONE
    from tunebook.launching.launch import find_script, launch

    program = str(again.past.summary.get("program"))
    script = find_script(program if program in PROGRAMS else PROGRAMS[0])
    code = launch(script, again.words, again.world.num_processes)
    if code == EXIT_DONE:
        [here] = read_past_runs([again.plan.run_dir])
        for line in compare_results(again.past, here):
            _say(line)
    return code


def prepare_again(run_dir: str, overrides: Sequence[str], target: str | None, num_processes: int | None) -> Again:
    """Return the run to start. Raises Refused where its recipe is not there, cannot be read, or cannot run here."""
    [past] = read_past_runs([run_dir])
    recipes = sorted(past.folder.glob("*.yaml"))
    if len(recipes) != 1:
        raise Refused(Problem(f"{len(recipes)} recipes are there, and a run has one", where=run_dir))
    place = _check_target(past.folder, target or str(Path("runs") / f"{past.folder.resolve().name}-repro"))
    device: DeviceType = "cuda" if count_gpus() else "cpu"
    world = world_of(num_processes or _processes(past, device), device)
    given = {word.partition("=")[0] for word in overrides}
    derived = (*_left_out(past), *_pinned(past, world))
    settings = (*(word for word in derived if word.partition("=")[0] not in given), *overrides)
    recipe = _load_again(past, str(recipes[0]), settings)
    plan = plan_without_data(recipe, world, place)
    dtype = past.summary.get("compute_dtype")
    if recipe.model.dtype == "auto" and plan.compute_dtype != dtype and dtype in ("float32", "bfloat16", "float16"):
        settings = (f"model.dtype={dtype}", *settings)
        recipe = load_recipe(str(recipes[0]), settings)
        plan = plan_without_data(recipe, world, place)
    check_folder(plan, recipe, fresh=False)
    return Again(past, recipe, world, plan, (str(recipes[0]), *settings, "--run-dir", place))


def _load_again(past: PastRun, path: str, settings: Sequence[str]) -> Recipe:
    """Read the recipe. Raises Refused with all that is wrong, a folder of the base that the Hub would be asked for too.

    The name of such a folder may be that of a model on the Hub; that it was a folder there is told by its hash.
    """
    problems: list[Problem] = []
    with _pointing_to_places(past):
        try:
            recipe = load_recipe(path, settings)
        except Refused as refused:
            problems += refused.problems
        key, begun = "model.name_or_path", read_begun(str(past.folder))
        written = [word.partition("=")[2] for word in settings if word.startswith(f"{key}=")]
        name = str((written or [past.recipe.get(key, "")])[-1])
        was_folder = begun is not None and "@" not in str(begun.identity.get("base model", "@"))
        if was_folder and not is_local(name) and key not in {problem.key for problem in problems}:
            problems.insert(0, Problem(f"{name} was a folder there, and is none here", where=path, key=key))
        if problems:
            raise Refused(problems)
    return recipe


def say_differences(again: Again) -> list[Difference]:
    """Print what differs here and what does not; return what makes another run of it."""
    past, plan = again.past, again.plan
    overrides = shlex.join(again.words[1:-2])
    _say(f"{past.folder} again, in {plan.run_dir}{f', with {overrides}' if overrides else ''}")
    differences, same = find_surroundings(past, again.world.device_type, again.world.num_processes)
    begun = read_begun(str(past.folder))
    others: list[Difference] = []
    if begun is None:
        _say("note: no identity.json tells which rows, base and tokenizer that run had; they are not compared")
    else:
        given = [word.partition("=")[0] for word in again.words if "=" in word]
        others = find_other_contents(begun.identity, _identity_here(again), given)
        if not others:
            same = ["data, base, tokenizer and all values that the result depends on", *same]
    for difference in (*others, *differences):
        _say(f"differs: {difference}")
    if same:
        _say(f"the same: {', '.join(same)}")
    return others


def _identity_here(again: Again) -> dict[str, object]:
    from tunebook.data.prepare import prepare_data
    from tunebook.data.tokenizer import tokenizer_of
    from tunebook.system.quiet import quiet_libraries
    from tunebook.training.starting import build_identity

    with placed_in(again.recipe), _pointing_to_places(again.past):
        tokenizer = tokenizer_of(again.recipe)
        data = prepare_data(again.recipe, tokenizer)
        with quiet_libraries():
            return build_identity(again.recipe, again.plan, tokenizer, data)


def _left_out(past: PastRun) -> tuple[str, ...]:
    """Return the override that keeps the copy from being published in the original's place."""
    return ("hub=null",) if any(key.partition(".")[0] == "hub" for key in past.recipe) else ()


def _pinned(past: PastRun, world: World) -> tuple[str, ...]:
    """Return overrides for what the recipe leaves to its surroundings: commit of the base, batch and rate."""
    summary, recipe, pinned = past.summary, past.recipe, []
    commit, name = str(summary.get("model_revision")), str(recipe.get("model.name_or_path"))
    if COMMIT.fullmatch(commit) and recipe.get("model.revision") != commit and not is_local(name):
        pinned.append(f"model.revision={commit}")
    if summary.get("world_size") in (None, world.num_processes):
        return (*pinned, *_chosen(past))
    if recipe.get("training.global_batch_size") is None:
        pinned += [f"training.global_batch_size={summary.get('global_batch_size')}"]
        pinned += ["training.gradient_accumulation_steps=null"]
    if recipe.get("training.learning_rate_scaling") not in (None, "none") and "learning_rate" in summary:
        pinned += [f"training.learning_rate={summary.get('learning_rate')!r}", "training.learning_rate_scaling=none"]
        if "training.learning_rate_base_processes" in recipe:
            pinned += ["training.learning_rate_base_processes=null"]
    return tuple(pinned)


def _chosen(past: PastRun) -> list[str]:
    """Return what `auto` came to then: equal settings give equal bits, others the same to rounding."""
    chosen = {name: past.plan.get(name) for name in ("per_device_train_batch_size", "activation_checkpointing")}
    return [
        f"training.{name}={json.dumps(value)}"
        for name, value in chosen.items()
        if past.recipe.get(f"training.{name}") == AUTO and isinstance(value, int)
    ]


def _processes(past: PastRun, device: str) -> int:
    """Return as many processes as the run had, or as many as this machine has GPUs, or processors, for."""
    wanted = past.summary.get("world_size")
    most = count_gpus() if device == "cuda" else os.cpu_count() or 1
    return max(1, min(wanted, most)) if isinstance(wanted, int) else 1


def _check_target(source: Path, target: str) -> str:
    """Return the run folder of the copy; Refused where it is the original, or one lies in the other."""
    one, other = source.resolve(), Path(target).resolve()
    if one == other or one in other.parents or other in one.parents:
        raise Refused(Problem(f"is not apart from {source}, which stays as it is", "Use --run-dir DIR", target))
    return target


@contextmanager
def _pointing_to_places(past: PastRun) -> Iterator[None]:
    """Add to each problem about a base or data that are not found how to say where they are here."""
    try:
        yield
    except Refused as refused:
        raise Refused([_pointed(problem, past) for problem in refused.problems]) from refused


def _pointed(problem: Problem, past: PastRun) -> Problem:
    if problem.key.startswith("data.sources"):
        value = "data.sources=[{path: PLACE}, ...]"
    elif problem.key in ("model.name_or_path", "data.path", "data.template"):
        written = str(past.recipe.get(problem.key, ""))
        above = [parent / written for parent in past.folder.resolve().parents]
        near = next((str(place) for place in above if written and place.exists()), "PLACE")
        value = f"{problem.key}={near}"
    else:
        return problem
    fix = f"{problem.fix.rstrip('.')}; or" if problem.fix else "Or"
    return replace(problem, fix=f"{fix} say where it is: {shlex.join(['tunebook', 'repro', str(past.folder), value])}")


def _say(text: str) -> None:
    build_console().print(text, soft_wrap=True, markup=False, highlight=False)
