"""The world: what the launcher gave us, read once from its environment."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tunebook.errors import Problem, Refused
from tunebook.launching.checks import Ranks, check_backend, check_one_group, check_precision, check_strategy, read_ranks
from tunebook.launching.command import (
    DeviceType,
    Launch,
    Launcher,
    Surroundings,
    is_true,
    load_parent_command,
    read_launch,
    render_launch,
)
from tunebook.launching.sharding import is_sharded
from tunebook.system.network import check_reached

_LAUNCHER_NAMES: dict[Launcher, str] = {
    "accelerate": "accelerate launch",
    "torchrun": "torchrun",
    "tunebook": "tunebook launch",
    "python": "python",
}


@dataclass(frozen=True)
class World:
    """Processes, ranks, device and backend of this run, read once from the launcher's environment.

    `backend` is None for a single process (no process group is made). `device_type` is "cuda" or "cpu"; `num_gpus` are
    the visible ones, used or not. `shards` tells that accelerate shards the model over them (FSDP2). `notes` are lines
    that rank 0 prints first, e.g. that the launcher started fewer processes than were asked for.
    """

    num_processes: int = 1
    rank: int = 0
    local_rank: int = 0
    num_local_processes: int = 1
    device_type: DeviceType = "cpu"
    num_gpus: int = 0
    backend: str | None = None
    launcher: Launcher = "python"
    shards: bool = False
    notes: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """The torch device of this process: `cuda:<local rank>` or `cpu`."""
        return f"cuda:{self.local_rank}" if self.device_type == "cuda" else "cpu"

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes (rank 0)."""
        return self.rank == 0


def world_of(num_processes: int, device_type: DeviceType = "cpu", ddp_backend: str | None = None) -> World:
    """Return a world that is not there, as rank 0 of `num_processes` on one machine would see it.

    Raises Refused for fewer than one process, or a backend that the device cannot have.
    """
    if num_processes < 1:
        raise Refused(Problem(f"a world has at least 1 process, got {num_processes}", where="--num-processes"))
    problems = check_backend(ddp_backend, device_type, num_processes)
    if problems:
        raise Refused(problems)
    return World(
        num_processes=num_processes,
        num_local_processes=num_processes,
        device_type=device_type,
        num_gpus=num_processes if device_type == "cuda" else 0,
        backend=_backend(ddp_backend, device_type, num_processes),
        launcher="none",
    )


def read_world(
    environ: Mapping[str, str] = os.environ,
    *,
    surroundings: Surroundings | None = None,
    compute_dtype: str = "auto",
    ddp_backend: str | None = None,
) -> World:
    """Return the world that `accelerate launch`, torchrun, `tunebook launch` or plain python made.

    `compute_dtype` is the recipe's `model.dtype`, `ddp_backend` its `training.ddp_backend`. The function reads nothing
    but its arguments when `surroundings` are given; else it also sees that rank 0's machine is reached, where there are
    several. torch is imported only where a GPU could be (`count_gpus`).
    Raises Refused with everything that is wrong with the launch, each with the command to type instead.
    """
    around = surroundings if surroundings is not None else look_around(environ)
    launch = read_launch(environ, around)
    ranks, problems = read_ranks(launch)
    problems += check_one_group(launch, ranks)
    if not problems:  # numbers that contradict each other say nothing about GPUs
        problems += _check_gpus(launch, ranks)
    problems += check_strategy(launch, ranks)
    problems += check_precision(launch, compute_dtype)
    problems += check_backend(ddp_backend, launch.device_type, ranks.num_processes)
    if not problems and surroundings is None:
        problems += check_reached(environ)
    if problems:
        raise Refused(problems)
    return World(
        num_processes=ranks.num_processes,
        rank=ranks.rank,
        local_rank=ranks.local_rank,
        num_local_processes=ranks.num_local_processes,
        device_type=launch.device_type,
        num_gpus=launch.num_gpus,
        backend=_backend(ddp_backend, launch.device_type, ranks.num_processes),
        launcher=launch.launcher,
        shards=is_sharded(launch, ranks.num_processes),
        notes=tuple(_notes(launch, ranks, around.has_gpu_node)),
    )


def look_around(environ: Mapping[str, str] = os.environ) -> Surroundings:
    """Return what the machine and /proc tell about this process."""
    return Surroundings(
        num_gpus=count_gpus(environ),
        has_gpu_node=_has_gpu_node(),
        parent_command=load_parent_command(),
        argv=tuple(sys.argv),
    )


def count_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many GPUs torch sees; 0 at once, without importing torch, where there can be none.

    There can be none where no device node of NVIDIA, WSL or AMD exists, or where CUDA_VISIBLE_DEVICES hides them all
    (it is empty, or starts with -1, which ends the list).
    """
    if not _has_gpu_node() or _hides_gpus(environ):
        return 0
    import torch

    return int(torch.cuda.device_count())


def _has_gpu_node() -> bool:
    devices = Path("/dev")
    return any(devices.glob("nvidia[0-9]*")) or (devices / "dxg").exists() or (devices / "kfd").exists()


def _hides_gpus(environ: Mapping[str, str]) -> bool:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and visible.split(",")[0].strip() in ("", "-1")


def _backend(ddp_backend: str | None, device_type: DeviceType, num_processes: int) -> str | None:
    if num_processes == 1:
        return None
    return ddp_backend or ("nccl" if device_type == "cuda" else "gloo")


def _check_gpus(launch: Launch, ranks: Ranks) -> list[Problem]:
    """Refuse one process that sees several GPUs, and more processes on this machine than it has GPUs."""
    num_gpus = launch.num_gpus
    if launch.device_type == "cpu":
        return []
    if ranks.num_processes == 1 and num_gpus > 1:
        return [
            Problem(
                f"{_LAUNCHER_NAMES[launch.launcher]} started one process where {num_gpus} GPUs are visible, "
                "which would run DataParallel",
                f"Type {launch.render_launch(num_gpus)}, or for one GPU {launch.render_launch(1)}",
                where="launch",
            )
        ]
    wanted = max(ranks.num_local_processes, ranks.local_rank + 1)
    if wanted > num_gpus:
        on_cpu = f"CUDA_VISIBLE_DEVICES= {render_launch(wanted, 'cpu', launch.argv)}"
        gpus = "1 visible GPU" if num_gpus == 1 else f"{num_gpus} visible GPUs"
        return [
            Problem(
                f"{wanted} processes on this machine and {gpus}, but each process needs its own",
                f"Type {launch.render_launch(num_gpus)}, or on the CPU {on_cpu}",
                where="launch",
            )
        ]
    return []


def _notes(launch: Launch, ranks: Ranks, has_gpu_node: bool) -> list[str]:
    notes = []
    if ranks.num_processes == 1 and launch.launcher == "accelerate":
        notes += _note_fewer_than_asked(launch)
    if launch.device_type == "cuda" and 1 < ranks.num_local_processes < launch.num_gpus:
        notes.append(f"{ranks.num_local_processes} of the {launch.num_gpus} visible GPUs are used.")
    if is_true(launch.environ.get("ACCELERATE_USE_CPU")) and (launch.num_gpus or has_gpu_node):
        notes.append("accelerate was started with --cpu or use_cpu: the run is on the CPU and the GPUs stay idle.")
    elif has_gpu_node and not launch.num_gpus and not _hides_gpus(launch.environ):
        notes.append(
            "This machine shows a GPU that torch cannot use, so the run is on the CPU: is this a CPU build of torch?"
        )
    return notes


def _note_fewer_than_asked(launch: Launch) -> list[str]:
    """Say that accelerate started one process although several were meant, and what starts them."""
    asked = launch.command.num_processes if launch.command else None
    # With several processes asked for, accelerate exports MASTER_PORT even to the single one it starts.
    if asked == 1 or (asked is None and "MASTER_PORT" not in launch.environ):
        return []
    number = asked or "N"
    on_cpu = render_launch(number, "cpu", launch.argv)
    if launch.device_type == "cuda":
        way = f"1 GPU is visible. For {number} on the CPU instead: CUDA_VISIBLE_DEVICES= {on_cpu}"
    else:
        way = f"without several GPUs accelerate starts several only when told so. For {number} on the CPU: {on_cpu}"
    return [f"1 process runs although {asked or 'more'} were asked for: {way}"]
