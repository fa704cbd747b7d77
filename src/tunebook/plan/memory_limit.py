"""How much memory one process may use: what its GPU has, what the machine can still give, or what a user says."""

import math
import os
from pathlib import Path

from tunebook.errors import Problem, Refused
from tunebook.launching.world import World
from tunebook.plan.memory import GIB

VARIABLE = "TUNEBOOK_MEMORY_GIB"
GROUP = Path("/sys/fs/cgroup")


def find_limit(world: World) -> int:
    """Return the bytes that this process may use; best asked before it loads a model.

    TUNEBOOK_MEMORY_GIB says them, but on a GPU never more than it has. Without it: on a GPU its memory, on a CPU what
    the machine can still give, shared by the processes there. Raises Refused where the variable is no number of GiB.
    """
    said = read_said()
    if world.device_type == "cuda":
        import torch

        has = int(torch.cuda.get_device_properties(world.device).total_memory)
        return has if said is None else min(said, has)
    return free_bytes() // world.num_local_processes if said is None else said


def read_said() -> int | None:
    """Return the bytes that TUNEBOOK_MEMORY_GIB says, None where it is not set."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < 1e6:  # nan is neither
        raise Refused(
            Problem(f"got {text!r}, expected GiB of memory for each process", "Give for example 24", VARIABLE)
        )
    return round(number * GIB)


def name_limit(world: World, limit: int) -> str:
    """Return what the limit in bytes is, for messages: `12.00 GiB are ...`."""
    if read_said() == limit:
        return f"allowed by {VARIABLE}"
    return "on the smallest GPU" if world.device_type == "cuda" else "free for each process"


def free_bytes(meminfo: Path = Path("/proc/meminfo"), group: Path = GROUP) -> int:
    """Return what the machine can still give, or the control group of a container, whichever is less."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines() if ":" in line)
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):  # not Linux
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        most, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, min(free, most - used + int(cached.get("inactive_file", 0))))
    except (OSError, ValueError):  # no such group, or `max`: no limit
        return free
