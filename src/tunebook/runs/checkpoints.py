"""Checkpoint folders: whole or absent, told apart by a manifest, and which of them are kept.

Nothing here knows what is in a checkpoint; `training.saving` does.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebook.system.writing import delete_folder, put_in_place, write_whole

MANIFEST = "manifest.json"
PROGRESS = "progress.json"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: its folder, the step it was saved after, and the sha256 of its manifest."""

    folder: Path
    step: int
    digest: str

    def read_progress(self) -> dict[str, Any]:
        """Return what tunebook keeps of a run beside the Trainer's own state."""
        progress: dict[str, Any] = json.loads((self.folder / PROGRESS).read_text(encoding="utf-8"))
        return progress


class NotWhole(ValueError):
    """A folder is no whole checkpoint; the message names the file and what is wrong with it."""


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    """Return where the checkpoint of a step stands, by the Trainer's own name for it."""
    return checkpoints / f"checkpoint-{step}"


def finish_checkpoint(beside: Path, folder: Path, step: int) -> Checkpoint:
    """Write the manifest of the files in `beside`, flush them all, and rename it to `folder`."""
    files = {
        str(path.relative_to(beside)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(beside.rglob("*"))
        if path.is_file()
    }
    write_whole(beside / MANIFEST, json.dumps({"step": step, "files": files}, indent=1) + "\n")
    put_in_place(beside, folder)
    return Checkpoint(folder, step, _sha256(folder / MANIFEST))


def check_whole(folder: Path) -> Checkpoint:
    """Return the checkpoint in `folder` after reading every byte of it; raise NotWhole where one is not as saved."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {str(name): (int(one["bytes"]), str(one["sha256"])) for name, one in manifest["files"].items()}
        step = int(manifest["step"])
    except FileNotFoundError as error:
        raise NotWhole(f"{MANIFEST} is missing") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotWhole(f"{MANIFEST} cannot be read") from error
    if PROGRESS not in files:
        raise NotWhole(f"{MANIFEST} does not list {PROGRESS}")
    for name, (num_bytes, sha256) in files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != num_bytes:
                raise NotWhole(f"{name} has {size:,} bytes instead of {num_bytes:,}")
            if _sha256(path) != sha256:
                raise NotWhole(f"{name} has another content than was saved")
        except FileNotFoundError as error:
            raise NotWhole(f"{name} is missing") from error
        except OSError as error:
            raise NotWhole(f"{name} cannot be read ({error.strerror})") from error
    return Checkpoint(folder, step, _sha256(folder / MANIFEST))


def find_newest(checkpoints: Path, needs_best: bool = False) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """Return the newest whole checkpoint, and for each newer folder that is none a line that names it and says why.

    With `needs_best` the best checkpoint up to it must be whole, too: going on from before it finds it again.
    """
    skipped: list[str] = []
    for folder in reversed(list_checkpoints(checkpoints)):
        try:
            found = check_whole(folder)
            best = found.read_progress().get("best_step")
            if needs_best and best is not None and best != found.step:
                check_best(checkpoint_folder(checkpoints, best))
            return found, tuple(skipped)
        except NotWhole as reason:
            skipped.append(f"{folder.name} is skipped: {reason}")
    return None, tuple(skipped)


def check_best(folder: Path) -> None:
    """Raise NotWhole where the best checkpoint, whose weights a run is to end with, is not as it was saved."""
    try:
        check_whole(folder)
    except NotWhole as reason:
        raise NotWhole(f"the best checkpoint is {folder.name}, and there {reason}") from reason


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the checkpoint folders by step, whole or not."""
    found = [path for path in checkpoints.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted((path for path in found if path.is_dir()), key=step_of)


def step_of(folder: Path) -> int:
    """Return the step in a checkpoint folder's name."""
    return int(folder.name.rpartition("-")[2])


def delete_older(newest: Checkpoint, num_kept: int | None, best_step: int | None) -> None:
    """Delete checkpoints beyond `num_kept`, never `newest` (known to be whole) nor the best.

    Those with a later step than the newest are of a past that could not be resumed; they go first, then the oldest.
    """
    folders = list_checkpoints(newest.folder.parent)
    kept = {newest.step, newest.step if best_step is None else best_step}
    candidates = sorted(
        (folder for folder in folders if step_of(folder) not in kept),
        key=lambda folder: (step_of(folder) < newest.step, step_of(folder)),
    )
    num_excess = len(folders) - num_kept if num_kept is not None else 0
    for folder in candidates[: max(num_excess, 0)]:
        delete_folder(folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
