"""Files that a command writes for the user: checked before the work begins, whole or not there at its end."""

import os
from collections.abc import Sequence
from pathlib import Path

from tunebook.errors import Problem, Refused
from tunebook.runs.folder import OURS
from tunebook.system.places import local_path
from tunebook.system.writing import explain_unwritten, find_fault_of_place, write_whole


def check_out(out: str, run_dir: Path, inputs: Sequence[str] = ()) -> Path:
    """Return the path of a file to write. Raises Refused where it can't be written, or would replace what is read."""
    path = local_path(out)
    fault = _find_fault(path, run_dir, inputs) if out.strip() else "is empty"
    if fault:
        raise Refused(Problem(f"{out} {fault}" if out.strip() else "is empty", "Name another file", "--out"))
    return path


def write_out(path: Path, text: str) -> None:
    """Write the file. Raises Refused where that fails, with nothing half written and an earlier file as it was."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise Refused(Problem(explain_unwritten(error, path), "Name another file", "--out")) from error


def _find_fault(path: Path, run_dir: Path, inputs: Sequence[str]) -> str:
    if fault := find_fault_of_place(path):
        return fault
    if path.is_dir():
        return "is a folder"
    if any(path.resolve() == local_path(one).resolve() for one in inputs):
        return "is what is read"
    return "is the run's own" if _belongs_to_run(path.resolve(), run_dir.resolve()) else _find_closed_door(path)


def _belongs_to_run(path: Path, run_dir: Path) -> bool:
    """Whether a run writes under this name, or would be taken for another one with it."""
    if not path.is_relative_to(run_dir):
        return False
    return path.relative_to(run_dir).parts[0] in OURS or path.suffix in (".yaml", ".yml")


def _find_closed_door(path: Path) -> str:
    parent = next(place for place in path.absolute().parents if place.exists())
    if not parent.is_dir():
        return f"can't be written: {parent} is a file"
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"can't be written: no permission in {parent}"
    return ""
