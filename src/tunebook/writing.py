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
    _flush(path.parent)


def folder_beside(folder: Path) -> Path:
    """Return an empty folder next to `folder`, to be filled and handed to `put_in_place`."""
    beside = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside


def put_in_place(beside: Path, folder: Path) -> None:
    """Flush what is in `beside` and rename it to `folder`, in the place of an earlier one."""
    for path in (*beside.rglob("*"), beside):
        if path.is_file():
            # safetensors makes files that only their owner reads; who may read the folder may read what is in it.
            path.chmod(beside.stat().st_mode & 0o666)
        _flush(path)
    earlier = folder.with_name(f".{folder.name}.earlier")
    shutil.rmtree(earlier, ignore_errors=True)
    if folder.exists():
        folder.rename(earlier)
    beside.rename(folder)
    _flush(folder.parent)  # the rename itself, else a machine that goes down may forget it
    shutil.rmtree(earlier, ignore_errors=True)


def delete_folder(folder: Path) -> None:
    """Delete a folder so that no part of it is ever met under its own name."""
    going = folder.with_name(f".{folder.name}.deleting")
    shutil.rmtree(going, ignore_errors=True)
    folder.rename(going)
    shutil.rmtree(going, ignore_errors=True)


def delete_leftovers(parent: Path) -> None:
    """Delete what broken-off writing and deleting left in `parent`."""
    restore_earlier(parent)
    for path in parent.glob(".*"):
        if path.suffix in (".writing", ".deleting", ".earlier") and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def restore_earlier(parent: Path) -> None:
    """Move back each folder that was moved away for a new one to take its place, which then did not come."""
    for path in parent.glob(".*.earlier"):
        place = parent / path.stem.removeprefix(".")
        if not place.exists():
            path.rename(place)


def _flush(path: Path) -> None:
    """Have the system write a file, or a folder's list of names, to its disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
