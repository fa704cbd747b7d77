"""A rank that hangs is named, with its step and its stack, before the time-out of the group is over, and all ranks end.

The others wait in a collective and cannot know for whom, so threads tell each other through the group's store how far
their ranks have come. Nothing is sent, and nothing compared, until a rank has stood at one place for most of the
time-out: only then do all ranks say where they are, and those that are behind are the ones that the others wait for.
"""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from tunebook.errors import EXIT_FAILED
from tunebook.system.signals import close_ears
from tunebook.system.whereabouts import here, main_stack

# Parts of the time-out after which a rank asks where the others are, and after which it says who is behind.
ASKS_AFTER, SAYS_AFTER = 0.8, 0.9
KEY = "tunebook/watchdog"
NUM_STACKS = 3


@dataclass(frozen=True)
class Report:
    """Where one rank was when it was asked."""

    rank: int
    host: str
    num_arrivals: int
    place: str
    step: int
    stack: str


@dataclass(frozen=True)
class Verdict:
    """Which ranks hang, in words, and those of them that do not answer, who can say nothing themselves."""

    text: str
    silent: Sequence[int] = ()


class Watchdog:
    """The threads of one rank: one counts seconds and touches nothing else, one talks to the store.

    `last_words` is called with the reason before the process ends; the main thread may never run again.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int, timeout_seconds: float) -> None:
        self.last_words: Callable[[str], None] | None = None
        self._store, self._rank, self._num_ranks, self._timeout = store, rank, num_ranks, timeout_seconds
        self._tick = min(1.0, timeout_seconds / 40)
        self._ended = threading.Event()
        self._since, self._num_arrivals = time.monotonic(), here.num_arrivals
        self._heard = time.monotonic()
        self._verdict: Verdict | None = None
        self._threads = [
            threading.Thread(target=work, name=f"watchdog {name}", daemon=True)
            for name, work in (("clock", self._count), ("messenger", self._talk))
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads, for good."""
        self._ended.set()
        for thread in self._threads:
            thread.join(timeout=2)
        faulthandler.cancel_dump_traceback_later()

    @property
    def _stands(self) -> float:
        """Seconds since this rank last arrived anywhere, as a part of the time-out."""
        return (time.monotonic() - self._since) / self._timeout

    def _count(self) -> None:
        while not self._ended.wait(self._tick):
            # A main thread that hangs without letting others run stops this one, too: then the system's own timer
            # writes the stacks and ends the process, with exit code 1.
            faulthandler.dump_traceback_later(max(self._timeout, 10), exit=True)
            if here.num_arrivals != self._num_arrivals:
                self._since, self._num_arrivals = time.monotonic(), here.num_arrivals
            if self._verdict is not None:
                self._end(self._verdict)
            elif self._stands > SAYS_AFTER and time.monotonic() - self._heard > 2 * self._tick + 1:
                self._end(self._cut_off())

    def _talk(self) -> None:
        with suppress(RuntimeError):  # the process that holds the store is gone
            while not self._ended.wait(self._tick):
                self._exchange()
                self._heard = time.monotonic()

    def _exchange(self) -> None:
        store, alarm = self._store, f"{KEY}/alarm"
        asks = self._stands > ASKS_AFTER
        if asks:
            store.set(alarm, str(self._rank))
        elif store.check([alarm]) and store.get(alarm) == str(self._rank).encode():
            store.delete_key(alarm)  # it went on after all
        if store.check([alarm]):
            store.set(f"{KEY}/report/{self._rank}", json.dumps(asdict(self._report())))
        if self._stands > SAYS_AFTER and not store.check([f"{KEY}/verdict"]):
            behind = self._who_is_behind()
            if behind and store.add(f"{KEY}/judges", 1) == 1:
                store.set(f"{KEY}/verdict", json.dumps(asdict(self._judge(behind))))
        if store.check([f"{KEY}/verdict"]):
            self._verdict = Verdict(**json.loads(store.get(f"{KEY}/verdict")))

    def _report(self) -> Report:
        return Report(self._rank, socket.gethostname(), here.num_arrivals, here.place, here.step, main_stack())

    def _who_is_behind(self) -> dict[int, Report | None]:
        """Return the ranks that have not come to where this one stands, None for one that does not answer."""
        reports: dict[int, Report | None] = {}
        for rank in range(self._num_ranks):
            key = f"{KEY}/report/{rank}"
            report = Report(**json.loads(self._store.get(key))) if self._store.check([key]) else None
            if report is None or report.num_arrivals < here.num_arrivals:
                reports[rank] = report
        return reports

    def _judge(self, behind: dict[int, Report | None]) -> Verdict:
        lines = []
        silent = [rank for rank, report in behind.items() if report is None]
        known = [report for report in behind.values() if report is not None]
        for report in known:
            at = f"in step {report.step}" if report.step else "before step 1"
            lines.append(f"rank {report.rank} on {report.host} hangs {at}, after {report.place}")
        if silent:
            who = f"rank {silent[0]} does" if len(silent) == 1 else f"ranks {_listed(silent)} do"
            why = "a machine is gone or cut off, or a process is frozen"
            lines.append(f"{who} not answer {_at_step()}: {why}")
        waited = f"rank {self._rank} has waited {time.monotonic() - self._since:.0f} s at {here.place}"
        text = f"{'; '.join(lines)}; {waited} (training.ddp_timeout is {self._timeout:g} s)"
        for report in known[:NUM_STACKS]:
            text += f"\nthe stack of rank {report.rank}, innermost call last:\n{report.stack.rstrip()}"
        return Verdict(text, silent)

    def _cut_off(self) -> Verdict:
        text = (
            f"rank {self._rank} on {socket.gethostname()} has waited {time.monotonic() - self._since:.0f} s "
            f"{_at_step()} at {here.place}, and no word comes from rank 0's machine: it is gone, or the network to it "
            f"is cut (training.ddp_timeout is {self._timeout:g} s)"
        )
        return Verdict(text)

    def _end(self, verdict: Verdict) -> None:
        """Say it once on each machine, and end the process when the others have heard, too."""
        close_ears()  # the launcher's TERM after the first exit must not change the code of the others
        if self._speaks(verdict):
            again = "Once that is mended, run the same command again: it goes on from the last checkpoint"
            first, *stack = verdict.text.split("\n", 1)
            text = f"failed: {first}. {again}\n{''.join(stack)}".rstrip()
            with suppress(OSError, ValueError):
                os.write(sys.stderr.fileno(), f"{text}\n".encode())
        if self.last_words is not None:
            with suppress(Exception):  # a full disk, a folder that hangs as well: the exit code is what remains
                self.last_words(verdict.text.split("\n")[0])
        time.sleep(2 * self._tick)
        os._exit(EXIT_FAILED)

    def _speaks(self, verdict: Verdict) -> bool:
        """Return whether no rank before this one on its machine can say it."""
        first = self._rank - int(os.environ.get("LOCAL_RANK", self._rank))
        return all(rank in verdict.silent for rank in range(first, self._rank))


class _Kennel:
    """The watchdog of this process, of which there is one at most."""

    watchdog: Watchdog | None = None


def start_watchdog(store: Any, rank: int, num_ranks: int, timeout_seconds: float) -> None:
    """Watch over this rank of a group until `stop_watchdog`; `store` is the one that the group formed by."""
    if _Kennel.watchdog is None:
        _Kennel.watchdog = Watchdog(store, rank, num_ranks, timeout_seconds)


def stop_watchdog() -> None:
    """Stop watching; does nothing where nobody watches."""
    if _Kennel.watchdog is not None:
        _Kennel.watchdog.stop()
        _Kennel.watchdog = None


def set_last_words(last_words: Callable[[str], None] | None) -> None:
    """Have a function called with the reason before a hang ends this process; None for no function."""
    if _Kennel.watchdog is not None:
        _Kennel.watchdog.last_words = last_words


def _at_step() -> str:
    return f"in step {here.step}" if here.step else "before step 1"


def _listed(ranks: Sequence[int]) -> str:
    return " and ".join(part for part in (", ".join(map(str, ranks[:-1])), str(ranks[-1])) if part)
