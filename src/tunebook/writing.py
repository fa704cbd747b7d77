"""Files and folders that are whole or absent: written beside their place, flushed, then renamed into it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader, or a crash, meets the old content or the new, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.writing")
    try:
        with beside.open("wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
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


@contextmanager
def folder_to_fill(folder: Path) -> Iterator[Path]:
    """Give an empty folder to fill, which takes the place of `folder` at the end, or is deleted after an error."""
    beside = folder_beside(folder)
    try:
        yield beside
        put_in_place(beside, folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)  # on a full disk its space is needed
        raise


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


def explain_unwritten(error: Exception, place: Path) -> str:
    """Return one line on why a file or folder could not be written.

    torch and safetensors have errors of their own, which speak of offsets in files; how much room there is tells more.
    """
    reason = error.strerror if isinstance(error, OSError) and error.strerror else "writing broke off"
    existing = next(parent for parent in place.absolute().parents if parent.exists())
    free = shutil.disk_usage(existing).free
    return f"{place} could not be saved: {reason} ({free / 2**20:,.1f} MiB are free there)"


def _flush(path: Path) -> None:
    """Have the system write a file, or a folder's list of names, to its disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
