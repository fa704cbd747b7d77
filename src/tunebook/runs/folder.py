"""The run folder: who may use it, what is set aside, what a start writes into it. Only rank 0 touches it."""

import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebook.errors import Problem, Refused
from tunebook.launching.process_group import refuse_together
from tunebook.launching.world import World
from tunebook.plan.plan import Plan
from tunebook.recipe.reading import write_resolved
from tunebook.recipe.schema import Recipe
from tunebook.runs.checkpoints import list_checkpoints
from tunebook.runs.identity import Identity, find_differences, recipe_identity, taken_over
from tunebook.runs.lock import LOCK, hold, take
from tunebook.system.writing import delete_leftovers, write_whole

SUMMARY = "run_summary.json"
IDENTITY = "identity.json"
SECONDS_TO_BE_SEEN = 10.0
# What a tunebook run writes; a folder that holds other things is not ours to fill or to move.
OURS = ("plan.json", IDENTITY, SUMMARY, "metrics.jsonl", "checkpoints", "adapter", "quarantine.jsonl", LOCK)


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return run_summary.json of a run folder, or None where there is none that can be read."""
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return summary if isinstance(summary, dict) else None


def find_finished(plan: Plan, identity: Identity) -> dict[str, Any] | None:
    """Return the summary of a completed run in the run folder that had this very result to give, if it is there."""
    begun = read_begun(plan.run_dir)
    same = begun is not None and begun.identity == identity
    return read_summary(Path(plan.run_dir)) if same and is_completed(Path(plan.run_dir)) else None


@dataclass(frozen=True)
class Begun:
    """What an unfinished run in the folder began with: all its result depends on, and the settings that may change."""

    identity: Identity
    settings: Mapping[str, Any]


def read_begun(run_dir: str) -> Begun | None:
    """Return what the unfinished run in a folder began with; None where there is none, or none that went so far."""
    try:
        begun = json.loads((Path(run_dir) / IDENTITY).read_text(encoding="utf-8"))
        return Begun(dict(begun["result"]), dict(begun["settings"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def hold_run_folder(plan: Plan, recipe: Recipe, world: World, identity: Identity, keep: bool) -> Iterator[None]:
    """Open the run folder on rank 0 and hold it for all; every rank raises the same Refused where it cannot be had."""
    with ExitStack() as held:
        with refuse_together():
            if world.is_main:
                held.enter_context(open_run_folder(plan, recipe, identity, keep))
        with refuse_together():
            check_shared(plan, recipe, world)
        yield


def check_shared(plan: Plan, recipe: Recipe, world: World) -> None:
    """See on each machine whether the run folder that rank 0 has just opened is there, too.

    A run that broke off could not go on without it, which is said; one that is to end with its best checkpoint, which
    every rank loads, is refused.
    """
    folder = Path(plan.run_dir)
    if world.num_processes == world.num_local_processes or world.local_rank or _is_seen(folder):
        return
    where = f"{folder} of rank 0 is not seen on {socket.gethostname()}"
    fix = "Put the run folder where every machine sees it, by --run-dir DIR"
    if recipe.arguments.get("load_best_model_at_end"):
        message = f"{where}, and at the end every rank loads the best checkpoint from there"
        raise Refused(Problem(message, fix, recipe.path, "training.load_best_model_at_end"))
    print(f"note: {where}: should the run break off, it cannot go on. {fix}", file=sys.stderr, flush=True)


def _is_seen(folder: Path) -> bool:
    """Whether the lock that rank 0 holds tells of this launch; disks of other machines show it with a delay."""
    deadline = time.monotonic() + SECONDS_TO_BE_SEEN
    while True:
        with suppress(OSError):
            if (folder / LOCK).read_text(encoding="utf-8") == _launch_name():
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def _launch_name() -> str:
    """Return what all ranks of this launch know, and hardly those of another one."""
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return " ".join(os.environ.get(name, "") for name in names)


@contextmanager
def open_run_folder(plan: Plan, recipe: Recipe, identity: Identity, keep: bool) -> Iterator[Path]:
    """Make the run folder ready for a run and hold it, so that no second run writes into it.

    With `keep` the run goes on with what is there. Without, what is there is set aside under a dated name; nothing is
    deleted. Raises Refused when the folder is in use, or holds something that is no run.
    """
    folder = Path(plan.run_dir)
    check_free(folder)
    with take(folder, keep) as lock:
        try:
            lock.truncate(0)
            lock.write(_launch_name())
            lock.flush()
            _write_beginning(plan, recipe, identity, folder)
        except OSError as error:
            fix = "Make room, or use --run-dir DIR"
            raise Refused(Problem(f"cannot be written to: {error.strerror}", fix, str(folder))) from error
        yield folder


def _write_beginning(plan: Plan, recipe: Recipe, identity: Identity, folder: Path) -> None:
    delete_leftovers(folder)
    delete_leftovers(folder / "checkpoints")
    write_resolved(recipe, folder / f"{recipe.stem}.yaml")
    write_whole(folder / "plan.json", json.dumps(plan.as_dict(), indent=1) + "\n")
    written = {"result": identity, "settings": taken_over(recipe, plan)}
    write_whole(folder / IDENTITY, json.dumps(written, indent=1) + "\n")


def check_folder(plan: Plan, recipe: Recipe, fresh: bool, goes_on: bool = True) -> None:
    """Raise Refused if no run of this recipe may start, or go on, in its folder; every rank may ask, nothing changes.

    The data is not read yet: what it is compared by is checked later, by `training.starting`. A program that does not
    go on from checkpoints (`goes_on`) must not write over those of one that does.
    """
    folder = Path(plan.run_dir)
    check_free(folder)
    if fresh or not is_unfinished(folder):
        return
    begun = read_begun(plan.run_dir)
    has_checkpoints = bool(list_checkpoints(folder / "checkpoints"))
    fix = "Add --fresh to set it aside and start over, or use --run-dir DIR"
    if has_checkpoints and not goes_on:
        raise Refused(Problem("holds checkpoints, and this program goes on from none", fix, str(folder)))
    if begun is None and has_checkpoints:
        raise Refused(Problem("holds checkpoints of a run whose recipe is not known", fix, str(folder)))
    problems = find_differences(begun.identity, recipe_identity(recipe, plan), plan.run_dir) if begun else []
    if problems:
        raise Refused(problems)


def is_unfinished(folder: Path) -> bool:
    """Return whether the folder holds a run that did not come to its end, however far it got."""
    try:
        holds_a_run = any(path.name != LOCK for path in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False
    return holds_a_run and not is_completed(folder)


def is_completed(folder: Path) -> bool:
    """Return whether the folder holds a run that came to its end, and still has what came out of it."""
    adapter = folder / "adapter"
    has_weights = adapter.is_dir() and any(adapter.glob("*.safetensors"))
    return has_weights and (read_summary(folder) or {}).get("status") == "completed"


def check_free(folder: Path) -> None:
    """Raise Refused if the folder is in use, or no place for a run."""
    try:
        _look_into(folder)
    except FileNotFoundError:
        return  # another launch is setting it aside at this moment
    except OSError as error:
        fix = "Give yourself the right to read and write it, or use --run-dir DIR"
        raise Refused(Problem(f"cannot be looked into: {error.strerror}", fix, str(folder))) from error


def _look_into(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise Refused(Problem("is a file, and the run folder would stand there", "Use --run-dir DIR", str(folder)))
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if names and not names & set(OURS):
        raise Refused(Problem("holds something that is no run", "Use --run-dir DIR", str(folder)))
    if names and not os.access(folder, os.W_OK):
        raise Refused(Problem("holds a run, and cannot be written to", "Use --run-dir DIR", str(folder)))
    if LOCK in names:
        with (folder / LOCK).open("r") as lock:  # a shared lock, for all ranks of a launch ask at once
            hold(lock.fileno(), folder, fcntl.LOCK_SH)


@contextmanager
def hold_finished(folder: Path) -> Iterator[None]:
    """Hold a finished run's folder, so that no run takes it away meanwhile. Raises Refused where one is going on."""
    with ExitStack() as held:
        with suppress(OSError):  # somebody else's folder, which can only be read
            lock = held.enter_context((folder / LOCK).open("a"))
            hold(lock.fileno(), folder)
        yield
