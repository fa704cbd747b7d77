"""The run folder: who may use it, what is set aside, what a start writes into it. Only rank 0 touches it."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from tunebook.errors import Problem, Refused
from tunebook.plan import Plan
from tunebook.process_group import refuse_together
from tunebook.recipe.reading import write_resolved
from tunebook.recipe.schema import Recipe
from tunebook.world import World
from tunebook.writing import write_whole

SUMMARY = "run_summary.json"
LOCK = ".lock"
# What a tunebook run writes; a folder that holds other things is not ours to fill or to move.
OURS = ("plan.json", SUMMARY, "metrics.jsonl", "checkpoints", "adapter", "quarantine.jsonl", LOCK)


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return run_summary.json of a run folder, or None where there is none that can be read."""
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


def find_finished(plan: Plan, recipe_sha256: str, data_fingerprint: str) -> dict[str, Any] | None:
    """Return the summary of a completed run of this very recipe and data in the run folder, if it is there."""
    summary = read_summary(Path(plan.run_dir))
    same = summary and summary.get("recipe_sha256") == recipe_sha256
    same = same and summary and summary.get("data_fingerprint") == data_fingerprint
    return summary if summary and same and summary.get("status") == "completed" else None


@contextmanager
def hold_run_folder(plan: Plan, recipe: Recipe, world: World, fresh: bool) -> Iterator[None]:
    """Open the run folder on rank 0 and hold it for all; every rank raises the same Refused where it cannot be had."""
    with ExitStack() as held:
        with refuse_together():
            if world.is_main:
                held.enter_context(open_run_folder(plan, recipe, fresh))
        yield


@contextmanager
def open_run_folder(plan: Plan, recipe: Recipe, fresh: bool) -> Iterator[Path]:
    """Make the run folder ready for a new run and hold it, so that no second run writes into it.

    A finished run that is there is set aside under a dated name; an unfinished one, too, but only with `fresh`. Nothing
    is deleted. Raises Refused when the folder is in use, holds an unfinished run, or holds something that is no run.
    """
    folder = Path(plan.run_dir)
    check_folder(plan.run_dir, fresh)
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        if folder.is_dir() and any(path.name != LOCK for path in folder.iterdir()):
            _set_aside(folder)
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("w")
    except OSError as error:
        for parent in made:
            if parent.is_dir():
                parent.rmdir()
        raise Refused(Problem(f"cannot be made: {error.strerror}", "Use --run-dir DIR", str(folder))) from error
    with lock:
        _hold(lock.fileno(), folder)
        write_resolved(recipe, folder / f"{recipe.stem}.yaml")
        write_whole(folder / "plan.json", json.dumps(plan.as_dict(), indent=1) + "\n")
        yield folder


def check_folder(run_dir: str, fresh: bool) -> None:
    """Raise Refused if a new run may not start in the folder; changes nothing, so that every rank may ask."""
    folder = Path(run_dir)
    if folder.exists() and not folder.is_dir():
        raise Refused(Problem("is a file, and the run folder would stand there", "Use --run-dir DIR", str(folder)))
    if not folder.is_dir():
        return
    names = {path.name for path in folder.iterdir()}
    if not names:
        return
    if not names & set(OURS):
        raise Refused(Problem("holds something that is no run", "Use --run-dir DIR", str(folder)))
    if LOCK in names:
        with (folder / LOCK).open("r+") as lock:
            _hold(lock.fileno(), folder)
    summary = read_summary(folder) or {}
    if summary.get("status") != "completed" and not fresh:
        status = summary.get("status", "broken off before it trained")
        fix = "Add --fresh to set it aside and start over, or use --run-dir DIR"
        raise Refused(Problem(f"holds an unfinished run ({status})", fix, str(folder)))


def _hold(lock: int, folder: Path) -> None:
    try:
        # Released by the system however the process ends, so a killed run never blocks the next one.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        fix = "Wait for it, or use --run-dir DIR"
        raise Refused(Problem("is in use by a run that is going on", fix, str(folder))) from error


def _set_aside(folder: Path) -> Path:
    """Rename the folder to a dated name beside it; return the new name."""
    stamp = datetime.now().strftime("%Y-%m-%d-%H%M%S")
    for number in range(1000):
        aside = folder.with_name(f"{folder.name}.{stamp}{f'-{number}' if number else ''}")
        if not aside.exists():
            return folder.rename(aside)
    raise OSError(f"no free name beside {folder}")
