"""Python's search for garbage, put off while rows are turned into ids: it would visit every id again and again."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_search_paused() -> Iterator[None]:
    """Pause the search for cycles, which takes a quarter of this thread's time where rows and ids are made."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def collect_young() -> None:
    """Free the cycles among objects that were made since the last call; rendering a template leaves some."""
    gc.collect(0)
