"""Work that releases Python's lock, done one item ahead of who uses it."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def one_ahead(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield `work(item)` of each item in order, the next one being made in a second thread meanwhile.

    At most two results are held at once. Items are read in the caller's thread; an error in either thread is raised in
    its place in the order.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="one-ahead") as thread:
        pending: Future[Result] | None = None
        for item in items:
            following = thread.submit(work, item)
            if pending is not None:
                yield pending.result()
            pending = following
        if pending is not None:
            yield pending.result()
