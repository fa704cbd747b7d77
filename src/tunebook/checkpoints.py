"""Checkpoint folders: whole or absent, told apart by a manifest, and which of them are kept.

Nothing here knows what is in a checkpoint; `training.saving` does.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebook.writing import delete_folder, put_in_place, write_whole

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
        files: Mapping[str, Mapping[str, Any]] = manifest["files"]
        step = int(manifest["step"])
    except FileNotFoundError as error:
        raise NotWhole(f"{MANIFEST} is missing") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotWhole(f"{MANIFEST} cannot be read") from error
    for name, expected in files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                raise NotWhole(f"{name} has {size:,} bytes instead of {expected['bytes']:,}")
            if _sha256(path) != expected["sha256"]:
                raise NotWhole(f"{name} has another content than was saved")
        except FileNotFoundError as error:
            raise NotWhole(f"{name} is missing") from error
        except OSError as error:
            raise NotWhole(f"{name} cannot be read ({error.strerror})") from error
    return Checkpoint(folder, step, _sha256(folder / MANIFEST))


def find_newest(checkpoints: Path) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """Return the newest whole checkpoint, and for each newer folder that is none a line that names it and says why."""
    skipped: list[str] = []
    for folder in reversed(list_checkpoints(checkpoints)):
        try:
            return check_whole(folder), tuple(skipped)
        except NotWhole as reason:
            skipped.append(f"{folder.name} is skipped: {reason}")
    return None, tuple(skipped)


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
