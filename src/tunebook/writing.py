"""Files and folders that are whole or absent: written beside their place, flushed, then renamed into it."""

import os
import shutil
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader, or a crash, meets the old content or the new, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.writing")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def folder_beside(folder: Path) -> Path:
    """Return an empty folder next to `folder`, to be filled and handed to `put_in_place`."""
    beside = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside


def put_in_place(beside: Path, folder: Path) -> None:
    """Flush the files in `beside` and rename it to `folder`, in the place of an earlier one."""
    for path in beside.rglob("*"):
        if path.is_file():
            # safetensors makes files that only their owner reads; who may read the folder may read what is in it.
            path.chmod(beside.stat().st_mode & 0o666)
            with path.open("rb") as file:
                os.fsync(file.fileno())
    earlier = folder.with_name(f".{folder.name}.earlier")
    shutil.rmtree(earlier, ignore_errors=True)
    if folder.exists():
        folder.rename(earlier)
    beside.rename(folder)
    shutil.rmtree(earlier, ignore_errors=True)
