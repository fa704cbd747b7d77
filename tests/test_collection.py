"""The garbage collector waits while modules are imported, and works as usual once weights are loaded."""

import gc

from tunebook.system.collection import WHILE_IMPORTING, collect_as_usual, put_off_collection


class Cycle:
    """Garbage that only the collector frees."""

    alive = 0

    def __init__(self):
        Cycle.alive += 1
        self.own = self

    def __del__(self):
        Cycle.alive -= 1


def make_garbage(number):
    for _ in range(number):
        Cycle()


def test_it_waits_for_the_imports_and_then_collects_what_is_made_later():
    usual, frozen = gc.get_threshold(), gc.get_freeze_count()
    try:
        put_off_collection()
        gc.collect()
        make_garbage(2 * usual[0])
        assert Cycle.alive == 2 * usual[0] < WHILE_IMPORTING
        gc.collect()
        collect_as_usual()
        assert gc.get_threshold() == usual and gc.get_freeze_count() > frozen
        make_garbage(20 * usual[0])
        assert Cycle.alive <= 2 * usual[0]
    finally:
        gc.unfreeze()
        gc.set_threshold(*usual)
