"""Files and folders that are whole or absent: written beside their place, flushed, then renamed into it."""

import errno
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

# Names here stand for devices and for what the system tells: a file put in their place is one for the whole machine.
SYSTEM_FOLDERS = ("/dev", "/proc", "/sys")
SHARED_MEMORY = Path("/dev/shm")  # an ordinary folder there
LONGEST_NAME = 255  # bytes, on every file system of Linux that matters
# What stands around a name while it is written: `.NAME.deleting`.
NUM_AROUND = 10
MOST_LINKS = 40  # as the system has it


def find_fault_of_place(path: Path) -> str:
    """Return why neither a file nor a folder may be written under a name, links followed; "" where it may."""
    if str(path) == "-":
        return "would be a file of that name; standard output is not written to"
    if any(len(os.fsencode(part)) > LONGEST_NAME for part in path.parts):
        return "has a name that is too long"
    steps = _follow_links(path)
    if len(steps) > MOST_LINKS:
        return "is a link that leads in a circle"
    if len(os.fsencode(steps[-1].name)) > LONGEST_NAME - NUM_AROUND:
        return "has a name that is too long"
    return _find_fault_at(path, steps)


def _find_fault_at(path: Path, steps: Sequence[Path]) -> str:
    """Return what is wrong with what stands under a name, or where its links lead."""
    written = Path(os.path.normpath(path.absolute()))
    if system := next((one for one in (written, *steps) if _is_of_system(one)), None):
        way = "lies in" if system == written else "leads into"
        return f"{way} /{system.parts[1]}, which is the system's own"
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return f"can't be written: {error.strerror}"
    return "" if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else "is no regular file"


def _follow_links(path: Path) -> list[Path]:
    """Return where a name is, then where the link there leads, and so on; one more than MOST_LINKS where none ends."""
    steps = [_place_of(path)]
    while steps[-1].is_symlink() and len(steps) <= MOST_LINKS:
        steps.append(_place_of(steps[-1].parent / steps[-1].readlink()))
    return steps


def _place_of(path: Path) -> Path:
    """Return the place of a name without links in the folders above it; where it leads itself is not followed."""
    # Path.resolve raises where links lead in a circle.
    if path.name in ("", ".."):
        return Path(os.path.realpath(path))
    return Path(os.path.realpath(path.parent)) / path.name


def _is_of_system(place: Path) -> bool:
    return any(place.is_relative_to(folder) for folder in SYSTEM_FOLDERS) and SHARED_MEMORY not in place.parents


def _behind_links(path: Path) -> Path:
    """Return what a link leads to, so that the link stays; `.` and `..` by the name that the folder has."""
    return path.resolve() if path.name in ("", "..") or path.is_symlink() else path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader, or a crash, meets the old content or the new, never a part of it.

    Where a link stands, what it leads to is written. Raises OSError for names of the system, such as /dev/stdout.
    """
    if fault := find_fault_of_place(path):
        raise OSError(errno.EINVAL, fault, str(path))
    path = _behind_links(path)
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
    """Return an empty folder next to `folder`, to be filled and handed to `put_in_place`.

    Where a link stands, it is next to what the link leads to. Raises OSError for a place of the system.
    """
    if fault := find_fault_of_place(folder):
        raise OSError(errno.EINVAL, fault, str(folder))
    folder = _behind_links(folder)
    beside = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside


def put_in_place(beside: Path, folder: Path) -> None:
    """Flush what is in `beside` and rename it to `folder`, in the place of an earlier one.

    The empty folder that a shell stands in is filled instead: in its place another one would not be seen from there.
    """
    folder = _behind_links(folder)
    for path in (*beside.rglob("*"), beside):
        if path.is_file():
            # safetensors makes files that only their owner reads; who may read the folder may read what is in it.
            path.chmod(beside.stat().st_mode & 0o666)
        _flush(path)
    if _is_here(folder) and not any(folder.iterdir()):
        for path in sorted(beside.iterdir()):
            path.rename(folder / path.name)
        beside.rmdir()
        _flush(folder)
        return
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


def _is_here(folder: Path) -> bool:
    try:
        return folder.samefile(Path.cwd())
    except OSError:
        return False


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
