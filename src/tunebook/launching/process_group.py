"""The process group: made first, as the world says, checked against what accelerate sees, and left together."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from tunebook.errors import Problem, Refused
from tunebook.launching.world import World
from tunebook.system.meeting import RanksAbsent, has_address, join_store
from tunebook.system.network import name_interface
from tunebook.system.watchdog import start_watchdog, stop_watchdog
from tunebook.system.whereabouts import arrive

# With these accelerate makes a group of one, even around a single process that torchrun started.
TORCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def start_process_group(world: World, timeout_seconds: int = 1800) -> None:
    """Make the group of `world` before anything else makes accelerate's state, and check that they agree.

    On the CPU the state is forced to the CPU, else N launched processes would each believe to be alone. A collective
    that waits longer than `timeout_seconds` fails; transformers passes no timeout on for the CPU, so it is given here.
    A single process gets a state and no group, whichever launcher started it. A later `TrainingArguments` keeps all
    this with `accelerator_config={"use_configured_state": True}`, and `use_cpu` as in `world.device_type`.

    Raises Refused where no group forms, or where accelerate sees another world than the launcher's environment told.
    """
    from accelerate import PartialState

    on_cpu = world.device_type == "cpu"
    if not on_cpu:
        import torch

        torch.cuda.set_device(world.local_rank)
    if world.backend is None:
        with _without_torch_variables():
            state = PartialState(cpu=on_cpu)
    else:
        try:
            timeout = timedelta(seconds=timeout_seconds)
            if _group() is None and (names := meeting_point(timeout)):
                from torch import distributed

                distributed.init_process_group(world.backend, timeout=timeout, **names)
            state = PartialState(cpu=on_cpu, backend=world.backend, timeout=timeout)
        except (RuntimeError, ValueError) as error:  # DistError is a RuntimeError
            raise Refused(no_group(world, error)) from error
    _check_state(state, world)
    if (group := _group()) is not None:
        store = group.distributed_c10d._get_default_store()
        start_watchdog(store, world.rank, world.num_processes, timeout_seconds)


def stop_process_group() -> None:
    """Leave the group and forget accelerate's state; does nothing, and imports nothing, where there is none.

    Never raises: it also runs while another error is on its way, which must be the one that is seen.
    """
    stop_watchdog()
    if "accelerate" not in sys.modules:
        return
    from accelerate.state import AcceleratorState

    # DDP in a reference cycle (hooks, trainers) would be freed at the interpreter's end, after the group it works on,
    # and gloo's threads then abort the process ("terminate called without an active exception").
    gc.collect()
    group = _group()
    try:
        if group is not None:
            group.destroy_process_group()
    except RuntimeError as error:  # a peer is gone
        print(f"leaving the process group: {str(error).splitlines()[0]}", file=sys.stderr)
    AcceleratorState._reset_state(reset_partial_state=True)


@contextmanager
def process_group(world: World, timeout_seconds: int = 1800) -> Iterator[None]:
    """Have the group of `world` inside (`start_process_group`), and leave it after.

    After an error a group over nccl is left to the end of the process: leaving it in order would wait for collectives
    that the other ranks never finish.
    """
    start_process_group(world, timeout_seconds)
    try:
        yield
    except SystemExit:  # all ranks were told to leave
        stop_process_group()
        raise
    except BaseException:
        if world.backend != "nccl":
            stop_process_group()
        raise
    stop_process_group()


def meeting_point(timeout: timedelta) -> dict[str, Any]:
    """Return where the ranks meet, as arguments of init_process_group, once all have come (`meeting.join_store`).

    A restarted attempt (`--max-restarts`) meets under a name of its own: torch's agent keeps one store for all of them,
    and says otherwise (torch 2.13, distributed/rendezvous.py): a rank that is faster than another finds the address of
    that one's dead predecessor there, and cannot connect. Empty where the environment tells no place.
    """
    name_interface()
    if not has_address():
        return {}
    return join_store(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT') or 0}", timeout)


def agree_on_refusal(refused: Refused | None) -> None:
    """Raise the same Refused on every rank when any rank has one; each rank of the group must call this.

    A problem that rank 0 has comes first and once; the problems of others follow, with their rank, if rank 0 lacks
    them. Without a group (one process) the caller's own Refused is raised.
    """
    group = _group()
    if group is None:
        if refused is not None:
            raise refused
        return
    arrive("the question whether all ranks accept")
    by_rank: list[tuple[Problem, ...] | None] = [None] * group.get_world_size()
    group.all_gather_object(by_rank, refused.problems if refused is not None else None)
    merged = _merge(by_rank)
    if merged:
        raise Refused(merged) from refused


@contextmanager
def refuse_together() -> Iterator[None]:
    """Let what every rank does inside be refused by all ranks, or by none: `with refuse_together(): check_data(...)`.

    Any other error passes through at once; the launcher then ends the ranks that wait.
    """
    refused = None
    try:
        yield
    except Refused as error:
        refused = error
    agree_on_refusal(refused)


def _group() -> Any:
    """Return torch.distributed where it has a group, else None; torch is not imported for the question."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed


def _merge(by_rank: list[tuple[Problem, ...] | None]) -> list[Problem]:
    merged: list[Problem] = []
    seen: set[str] = set()
    for rank, problems in enumerate(by_rank):
        for problem in problems or ():
            if problem.render() not in seen:
                seen.add(problem.render())
                where = problem.where if rank == 0 else f"rank {rank}: {problem.where}".removesuffix(": ")
                merged.append(Problem(problem.message, problem.fix, where, problem.key))
    return merged


@contextmanager
def _without_torch_variables() -> Iterator[None]:
    held = {name: os.environ.pop(name) for name in TORCH_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(held)


def no_group(world: World, error: Exception) -> Problem:
    """Return why the ranks did not find each other, for a refusal."""
    reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    fix = (
        "Check that every machine reaches this address, and name the network in GLOO_SOCKET_IFNAME or "
        "NCCL_SOCKET_IFNAME if there are several"
    )
    if isinstance(error, RanksAbsent):
        fix = "See what they printed, or whether they were started: each has a RANK of its own"
    elif world.rank != 0 and "trying to connect" in reason:
        reason = f"rank 0, which meets the others there, was not started or is not reached: {reason}"
    if isinstance(error, RanksAbsent) or "timeout" in reason.lower() or "timed out" in reason.lower():
        fix += (
            ". If a machine prepares its data longer than training.ddp_timeout, run `tunebook prepare RECIPE` on it "
            "first, or raise that"
        )
    if "EADDRINUSE" in reason:
        reason = "another program, perhaps another run, listens on that port"
        fix = (
            "Leave the port out, and torchrun --standalone, accelerate launch and tunebook launch find a free one; or "
            "give another: --master_port of torchrun, --main_process_port of accelerate, MASTER_PORT elsewhere"
        )
    elif "EACCES" in reason:
        reason, fix = "this user may not listen on that port", "Give one above 1024, for example 29500"
    message = f"no group of {world.num_processes} processes formed over {world.backend} at {address} ({reason})"
    return Problem(message, fix, where="launch")


def _check_state(state: Any, world: World) -> None:
    """Refuse where accelerate's state, which everything later goes by, is not the world of the launcher."""
    group = _group()
    kind = {"cuda": "MULTI_GPU", "cpu": "MULTI_CPU"}[world.device_type] if world.backend else "NO"
    is_on_own_gpu = world.backend is not None and world.device_type == "cuda"
    expected = {
        "processes": world.num_processes,
        "rank": world.rank,
        "device": world.device if is_on_own_gpu else world.device_type,
        "kind": kind,
        "processes in the group": world.num_processes if world.backend else 0,
        "backend": world.backend,
    }
    seen = {
        "processes": state.num_processes,
        "rank": state.process_index,
        "device": str(state.device) if is_on_own_gpu else state.device.type,
        "kind": state.distributed_type.value,
        "processes in the group": group.get_world_size() if group else 0,
        "backend": group.get_backend() if group else None,
    }
    differences = [
        f"{name} {seen[name]} instead of {expected[name]}" for name in expected if seen[name] != expected[name]
    ]
    if differences:
        raise Refused(
            Problem(
                f"accelerate sees another world than the launcher made: {', '.join(differences)}",
                "Clear variables that steer accelerate (ACCELERATE_TORCH_DEVICE), and start by accelerate launch, "
                "torchrun or tunebook launch",
                where="launch",
            )
        )
