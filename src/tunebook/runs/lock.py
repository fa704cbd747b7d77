"""The lock of a run folder: who holds it is the only one that writes there, and the only one that may set it aside.

And a lock of moments, for a file that several processes change.
"""

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TextIO

from tunebook.errors import Problem, Refused

LOCK = ".lock"
SECONDS_OF_LOOKING = 1.0
# Launches that may set the same folder aside one after another while one of them is about to open it.
MOST_TRIES = 20


def take(folder: Path, keep: bool) -> TextIO:
    """Hold the folder, made where it is missing, and return its open lock.

    Without `keep` a run that is there is set aside under that run's own lock, which is let go once the new folder is
    held: of two launches that find the same old run, one is turned away.
    """
    opened: list[TextIO] = []
    try:
        for _ in range(MOST_TRIES):
            try:
                lock = _open_lock(folder)
            except FileNotFoundError:  # set aside by another launch, between its making and this
                continue
            opened.append(lock)
            why_not = hold(lock.fileno(), folder)
            if why_not is None and not _is_lock_of(folder, lock):  # set aside by another launch, which holds a new one
                continue
            is_empty = all(path.name == LOCK for path in folder.iterdir())
            if keep and is_empty:
                fix = "Run the same command again"
                raise Refused(Problem("held a run that was set aside by another launch meanwhile", fix, str(folder)))
            if keep or is_empty:
                if why_not is not None:
                    text = f"{folder} is on a disk without file locks ({why_not}): no second run may use it meanwhile"
                    print(f"note: {text}", file=sys.stderr, flush=True)
                return opened.pop()
            print(f"note: the run that was in {folder} is kept in {_set_aside(folder)}", file=sys.stderr, flush=True)
    except OSError as error:
        raise Refused(_cannot_be_made(folder, error)) from error
    finally:
        for lock in opened:
            lock.close()
    raise Refused(_in_use(folder))


def _open_lock(folder: Path) -> TextIO:
    """Open the lock of a folder, both made where they are missing; nothing is left of a folder that cannot be made."""
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / LOCK).open("a")  # what another run wrote there stays while that one holds it
    except FileNotFoundError:
        raise
    except OSError as error:
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        raise Refused(_cannot_be_made(folder, error)) from error


def _is_lock_of(folder: Path, lock: TextIO) -> bool:
    """Whether an open lock is the one at its place, and not that of a folder which has been renamed."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), (folder / LOCK).stat())
    except FileNotFoundError:
        return False


def hold(lock: int, folder: Path, kind: int = fcntl.LOCK_EX) -> str | None:
    """Lock an open file, or raise Refused; waits a moment for those who only look whether the folder is free.

    Returns why no lock is to be had, or None: some network disks have none (Lustre without -o flock, old NFS).
    """
    deadline = time.monotonic() + SECONDS_OF_LOOKING
    while True:
        try:
            # Released by the system however the process ends, so a killed run never blocks the next one.
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
            return None
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise Refused(_in_use(folder)) from error
        except OSError as error:
            return error.strerror or str(error)
        time.sleep(0.02)


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one process at a time read, change and write a file in a folder; others wait for it, moments at most.

    The folder itself is locked, so that no file of a lock is left there. On a disk without locks nobody waits.
    """
    with ExitStack() as held:
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
            held.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _in_use(folder: Path) -> Problem:
    return Problem("is in use by a run that is going on", "Wait for it, or use --run-dir DIR", str(folder))


def _cannot_be_made(folder: Path, error: OSError) -> Problem:
    return Problem(f"cannot be made: {error.strerror or error}", "Use --run-dir DIR", str(folder))


def _set_aside(folder: Path) -> Path:
    """Rename the folder to a dated name beside it; return the new name."""
    stamp = datetime.now().strftime("%Y-%m-%d-%H%M%S")
    for number in range(1000):
        aside = folder.with_name(f"{folder.name}.{stamp}{f'-{number}' if number else ''}")
        if not aside.exists():
            return folder.rename(aside)
    raise OSError(f"no free name beside {folder}")
