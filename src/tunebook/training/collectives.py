"""Numbers and texts of all processes, brought together; with one process they are returned as they are."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from tunebook.system.whereabouts import arrive


def sum_over_processes(values: Sequence[float], device: str) -> list[float]:
    """Return the element-wise sum over all processes, added in float64 (exact for integers below 2**53)."""
    return _reduce(values, device, "sum")


def largest_over_processes(values: Sequence[float], device: str) -> list[float]:
    """Return the element-wise largest value over all processes."""
    return _reduce(values, device, "max")


def gather_shares(share: Sequence[Any]) -> list[Any]:
    """Return the items of all processes in order, where process r of P holds items r, r + P, r + 2P..."""
    if not distributed.is_initialized():
        return list(share)
    arrive("the gathering of what each rank has")
    shares: list[Sequence[Any]] = [()] * distributed.get_world_size()
    distributed.all_gather_object(shares, list(share))
    return [shares[place % len(shares)][place // len(shares)] for place in range(sum(map(len, shares)))]


def from_rank_0(value: Any) -> Any:
    """Return rank 0's value on every process, for what only rank 0 can know or decide."""
    if not distributed.is_initialized():
        return value
    arrive("the word of rank 0")
    values = [value]
    distributed.broadcast_object_list(values, src=0)
    return values[0]


def wait_for_all() -> None:
    """Return when every process has come here."""
    if distributed.is_initialized():
        arrive("the wait for all ranks")
        distributed.barrier()


def _reduce(values: Sequence[float], device: str, operation: str) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    if distributed.is_initialized():
        arrive("a sum over all ranks")
        distributed.all_reduce(tensor, op={"sum": distributed.ReduceOp.SUM, "max": distributed.ReduceOp.MAX}[operation])
    reduced: list[float] = tensor.tolist()
    return reduced
