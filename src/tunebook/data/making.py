"""What a preparation that takes long says meanwhile, and whether the disk has room for what it writes."""

import math
import os
import shutil
import time
from pathlib import Path

from tunebook.errors import Problem, Refused

SILENT_SECONDS = 10.0
# What early rows tell of all rows is a guess: until a fifth is read only twice too little room is refused.
SURE_FROM = 0.2
SAFETY = 0.9
MORE_ROOM = "Free some space, or set TUNEBOOK_CACHE to a folder with room"


class SlowProgress:
    """Prints how many rows are done, at most every SILENT_SECONDS; what takes less time says nothing."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, num_done: int, num_rows: int) -> None:
        """Take note of rows done and rows in all."""
        now = time.monotonic()
        if now - self._said >= SILENT_SECONDS:
            self._said = now
            print(f"preparing the data: {num_done:,} of {num_rows:,} rows", flush=True)


def say_waiting() -> None:
    """Print, in one process of the machine, that another one prepares the data."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print("waiting for another process of this machine, which prepares the same data", flush=True)


def check_room(folder: Path, num_written: int, share_done: float) -> None:
    """Raise Refused where the disk of `folder` will be full before the rows are prepared.

    `num_written` bytes hold the labelled rows so far, `share_done` of all. All of them are then written a second time,
    split, before the first file is removed.
    """
    whole = num_written / share_done
    needed = whole - num_written + whole
    free = shutil.disk_usage(folder).free
    if needed * (SAFETY if share_done >= SURE_FROM else SAFETY / 2) > free:
        message = f"the prepared data needs about {_size(needed)} more, and the disk has {_size(free)} left"
        raise Refused(Problem(message, MORE_ROOM, where=str(folder.parent)))


def _size(num_bytes: float) -> str:
    units = ("bytes", "KB", "MB", "GB", "TB")
    power = min(len(units) - 1, int(math.log(max(num_bytes, 1), 1000)))
    return f"{num_bytes / 1000**power:.3g} {units[power]}"
