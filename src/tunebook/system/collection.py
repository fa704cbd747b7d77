"""Python's garbage collector, which while modules are imported looks again and again at what nothing will ever free."""

import gc

# Objects made and not let go of before the collector looks at the youngest: about what the imports make in all.
WHILE_IMPORTING = 200_000
_usual = gc.get_threshold()


def put_off_collection() -> None:
    """Let the imports pass without a look: a tenth of their time. Until `collect_as_usual`."""
    gc.set_threshold(WHILE_IMPORTING, *_usual[1:])


def collect_as_usual() -> None:
    """Collect as Python does by itself, but for what is there now: modules, which stay for good."""
    gc.freeze()
    gc.set_threshold(*_usual)
