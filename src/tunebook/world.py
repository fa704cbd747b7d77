"""The world: what the launcher gave us."""

from dataclasses import dataclass
from typing import Literal

Launcher = Literal["accelerate", "torchrun", "python", "none"]


@dataclass(frozen=True)
class World:
    """Processes, ranks, device and backend of this run, read once from the launcher's environment.

    `backend` is None for a single process (no process group is made). `device_type` is "cuda" or "cpu".
    `notes` are lines that rank 0 prints first, e.g. that the launcher started fewer processes than were asked for.
    """

    num_processes: int = 1
    rank: int = 0
    local_rank: int = 0
    num_local_processes: int = 1
    device_type: Literal["cuda", "cpu"] = "cpu"
    num_gpus: int = 0
    backend: str | None = None
    launcher: Launcher = "python"
    notes: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """The torch device of this process: `cuda:<local rank>` or `cpu`."""
        return f"cuda:{self.local_rank}" if self.device_type == "cuda" else "cpu"

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes (rank 0)."""
        return self.rank == 0
