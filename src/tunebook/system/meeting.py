"""Where the ranks of a group meet: the store through which they find each other, and a roll call that names who lacks.

Without the call torch says how many came, and a user of many machines has to find out which.
"""

import os
import time
from datetime import timedelta
from typing import Any

MOST_NAMED = 8
LONGEST_PAUSE_SECONDS = 0.2


class RanksAbsent(RuntimeError):
    """Ranks of the group did not come in time; the text names them."""


def has_address() -> bool:
    """Whether the environment tells where to meet and who this process is."""
    return all(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))


def join_store(name: str, timeout: timedelta) -> dict[str, Any]:
    """Return the store of the group called `name`, with rank and world size, as init_process_group takes them.

    Whoever called torch's agent finds its store; started by hand, rank 0 keeps one. Returns when all ranks have come;
    raises RanksAbsent after `timeout`, and another RuntimeError where there is no store at the address.
    """
    from torch import distributed

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        store, _, _ = next(distributed.rendezvous("env://", timeout=timeout))
    else:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        keeper = {"is_master": rank == 0, "multi_tenant": True, "wait_for_workers": False}
        store = distributed.TCPStore(address, port, world_size=size, timeout=timeout, **keeper)
    store.set_timeout(timeout)
    named = distributed.PrefixStore(name, store)
    call_roll(named, rank, size, timeout)
    return {"store": named, "rank": rank, "world_size": size}


def call_roll(store: Any, rank: int, size: int, timeout: timedelta) -> None:
    """Tell the others that this rank is here, and wait until all are; RanksAbsent names those that did not come."""
    keys = [f"here/{number}" for number in range(size)]
    store.set(keys[rank], "here")
    deadline, pause = time.monotonic() + timeout.total_seconds(), 0.01
    while not store.check(keys):  # store.wait would add lines of its own to what the ranks say
        if time.monotonic() > deadline:
            missing = [number for number, key in enumerate(keys) if not store.check([key])]
            if missing:
                raise RanksAbsent(f"{_named(missing)} did not come within {timeout.total_seconds():.0f} s")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _named(ranks: list[int]) -> str:
    shown = [str(rank) for rank in ranks[:MOST_NAMED]]
    if len(ranks) > MOST_NAMED:
        shown.append(f"{len(ranks) - MOST_NAMED} more")
    listed = f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else shown[0]
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
