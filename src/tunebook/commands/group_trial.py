"""A group of real processes on this machine, formed for a moment to see whether it can be."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

THIS_MODULE = "tunebook.commands.group_trial"


@dataclass(frozen=True)
class Trial:
    """What came of forming a group: the seconds it took, or why it failed."""

    num_processes: int
    backend: str
    seconds: float = 0.0
    failure: str = ""


def try_group(num_processes: int, backend: str, time_limit: float) -> Trial:
    """Form a group of child processes over `backend` (gloo or nccl), let it add up its ranks, and end it.

    No child outlives the call: those that have not ended within `time_limit` seconds are killed, and that is the
    failure. They meet in a file, so that no port is needed; the sum goes over the machine's network interface, as in
    training.
    """
    began, limit = time.monotonic(), str(time_limit)
    environ = {"OMP_NUM_THREADS": "1", **os.environ}
    children: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"{rank}.txt" for rank in range(num_processes)]
        try:
            for rank, output in enumerate(outputs):
                words = [sys.executable, "-m", THIS_MODULE, folder, backend, str(rank), str(num_processes)]
                with output.open("w") as file:
                    started = subprocess.Popen(
                        [*words, limit], stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environ
                    )
                children.append(started)
            late = _await(children, began + time_limit)
        finally:
            for child in children:
                child.kill()
                child.wait()
        seconds = time.monotonic() - began
        failure = f"rank {', '.join(map(str, late))} had not ended after {time_limit:g} s" if late else ""
        if not late:
            failure = next(filter(None, map(_failure_of, range(num_processes), children, outputs)), "")
    return Trial(num_processes, backend, seconds, failure)


def _failure_of(rank: int, child: subprocess.Popen[bytes], output: Path) -> str:
    if not child.returncode:
        return ""
    lines = output.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
    return f"rank {rank} ended with {child.returncode}: {lines[-1].strip()}"


def _await(children: Sequence[subprocess.Popen[bytes]], deadline: float) -> list[int]:
    """Wait for all children until the deadline, and return the ranks of those that run on."""
    late = []
    for rank, child in enumerate(children):
        try:
            child.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            late.append(rank)
    return late


def join_group(folder: str, backend: str, rank: int, num_processes: int, time_limit: float) -> None:
    """Be one rank of the trial: join, add up the ranks, leave. Raises what torch raises where that fails."""
    import torch
    from torch import distributed

    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    store = distributed.FileStore(str(Path(folder) / "store"), num_processes)
    timeout = timedelta(seconds=time_limit)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=num_processes, timeout=timeout)
    number = torch.tensor([rank], device=device)
    distributed.all_reduce(number)
    distributed.destroy_process_group()
    expected = num_processes * (num_processes - 1) // 2
    if number.item() != expected:
        raise RuntimeError(f"the ranks add up to {number.item()}, expected {expected}")


if __name__ == "__main__":
    join_group(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
