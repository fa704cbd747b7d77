"""The roll call of a group names the ranks that did not come, and only those."""

import threading
import time
from datetime import timedelta

import pytest

from tunebook.launching.process_group import no_group
from tunebook.launching.world import World
from tunebook.system.meeting import RanksAbsent, call_roll, has_address

SHORT = timedelta(seconds=0.3)


class Store:
    """What torch's stores have that the call needs, within one process."""

    def __init__(self):
        self.held = {}

    def set(self, key, value):
        self.held[key] = value

    def check(self, keys):
        return all(key in self.held for key in keys)


@pytest.mark.parametrize(
    ("size", "here", "named"),
    [
        (2, [0], "rank 1 did"),
        (4, [2, 0], "ranks 1 and 3 did"),
        (4, [3], "ranks 0, 1 and 2 did"),
        (64, [0], "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 55 more did"),
    ],
)
def test_who_did_not_come_is_named(size, here, named):
    store = Store()
    for rank in here[1:]:
        store.set(f"here/{rank}", "here")
    with pytest.raises(RanksAbsent, match=f"^{named} not come within 0 s$"):
        call_roll(store, here[0], size, SHORT)


def test_a_late_rank_is_waited_for_and_all_go_on_together():
    store, left = Store(), []

    def come(rank, delay):
        time.sleep(delay)
        call_roll(store, rank, 3, timedelta(seconds=20))
        left.append(time.monotonic())

    began = time.monotonic()
    ranks = [threading.Thread(target=come, args=(rank, delay)) for rank, delay in enumerate((0, 0.5, 0))]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=20)
    assert len(left) == 3 and min(left) - began >= 0.5


def test_the_environment_must_tell_the_place(monkeypatch):
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    assert has_address()
    monkeypatch.delenv("RANK")
    assert not has_address()


@pytest.mark.parametrize(
    ("rank", "error", "told", "untold"),
    [
        (0, RanksAbsent("rank 1 did not come within 16 s"), "(rank 1 did not come within 16 s). See what", "network"),
        (1, RuntimeError("The client socket has timed out after 9ms while trying to connect to (a, 1)."),
         "(rank 0, which meets the others there, was not started or is not reached: ", ".)"),
        (0, RuntimeError("failed to listen. port: 80, code: -13, name: EACCES"), "Give one above 1024", "network"),
        (0, RuntimeError("failed to listen. port: 80, code: -98, name: EADDRINUSE"), "another run, listens", "network"),
        (0, RuntimeError("gloo broke"), "Check that every machine reaches", "rank 0"),
    ],
)  # fmt: skip
def test_the_remedy_is_that_of_the_cause(rank, error, told, untold):
    line = no_group(World(2, rank, rank, 2, backend="gloo"), error).render()
    assert told in line and untold not in line
