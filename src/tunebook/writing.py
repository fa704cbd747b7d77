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


def delete_leftovers(parent: Path) -> list[str]:
    """Delete what broken-off writing and deleting left in `parent`; return the names of those broken off in writing."""
    names = []
    for path in sorted(parent.glob(".*")) if parent.is_dir() else []:
        if path.is_dir() and path.suffix in (".writing", ".deleting", ".earlier"):
            shutil.rmtree(path, ignore_errors=True)
            names += [path.stem.removeprefix(".")] if path.suffix == ".writing" else []
    return names


def _flush(path: Path) -> None:
    """Have the system write a file, or a folder's list of names, to its disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
