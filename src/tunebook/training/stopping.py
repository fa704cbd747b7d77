"""How all processes agree to stop after a signal to any of them, without waiting for each other at each micro-batch."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from tunebook.system.signals import asked_signal, signal_name
from tunebook.system.whereabouts import arrive

POLL_SECONDS = 0.25
# One key per vote that this process has held: what was said in an earlier run of the same group is over.
_num_votes = itertools.count()


class StopAgreed(BaseException):
    """All processes agreed to stop here; the message is the name of the signal.

    No Exception: libraries between the micro-batch and the run must not take it for a failure of their own.
    """


class StopVote:
    """Tells whether any process was asked to stop, and lets all of them agree on it.

    `is_asked` costs nothing: a thread passes the wish from process to process through the group's store. What it says
    differs between processes for a moment, so nothing collective may hang on it; `agree` is collective, and fails where
    a process stays away for `timeout_seconds`. It needs a group over gloo: over nccl the vote would make the host wait
    for the GPU at every step.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._key = f"tunebook/asked to stop/{next(_num_votes)}"
        self._told: int | None = None
        self._group: Any = None
        self._is_shared = distributed.is_initialized()
        if self._is_shared and distributed.get_backend() != "gloo":
            # Of itself a new group takes torch's half hour, whatever the group of all has.
            self._group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))

    @property
    def is_asked(self) -> bool:
        """Whether this process knows of a wish to stop."""
        return self._asked() is not None

    def agree(self) -> None:
        """Return when no process was asked to stop, else raise StopAgreed on all of them; each must call it."""
        number = self._asked() or 0
        if self._is_shared:
            arrive("the vote on going on")
            vote = torch.tensor([number])
            distributed.all_reduce(vote, op=distributed.ReduceOp.MAX, group=self._group)
            number = int(vote)
        if number:
            raise StopAgreed(signal_name(number))

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Pass wishes on, and hear of those of others, while inside."""
        if not self._is_shared:
            yield
            return
        ended = threading.Event()
        store = distributed.distributed_c10d._get_default_store()
        listener = threading.Thread(target=self._listen, args=(store, ended), name="stop vote", daemon=True)
        listener.start()
        try:
            yield
        finally:
            ended.set()
            listener.join(timeout=5)

    def _asked(self) -> int | None:
        return self._told if asked_signal() is None else asked_signal()

    def _listen(self, store: Any, ended: threading.Event) -> None:
        with suppress(RuntimeError):  # the process that holds the store is gone; the next collective tells
            while not ended.wait(POLL_SECONDS) and self._told is None:
                number = asked_signal()
                if number is not None:
                    store.set(self._key, str(number))
                    return
                if store.check([self._key]):
                    self._told = int(store.get(self._key))
