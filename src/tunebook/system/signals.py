"""Signals that ask this process to end: at once while nothing is at stake, at the next micro-batch while it trains.

A thread of its own acts on them, since Python's handlers wait for the main thread, which may stand in a collective that
never returns.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tunebook.errors import EXIT_INTERRUPTED

# Those of schedulers, terminals and launchers. SIGQUIT is left alone: it is how a user has a process end at once.
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
PR_SET_PDEATHSIG = 1
# A signal of its own: the kernel sends it once for each thread of the launcher that goes.
LAUNCHER_ENDED = signal.SIGRTMIN


class _Watch:
    """What this process knows of signals: process-wide, as signals are."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Know nothing."""
        self.deferred = False
        self.asked: int | None = None
        self.closed = False
        self.lock = threading.Lock()
        self.ears: tuple[socket.socket, socket.socket] | None = None


_watch = _Watch()


def watch_signals() -> None:
    """Take over the signals of `HANDLED` for this process; called once, from the main thread."""
    if _watch.ears is not None:
        return
    heard, told = socket.socketpair()
    told.setblocking(False)
    _watch.ears = (heard, told)
    for number in HANDLED:
        # A run under nohup, or in the background of a script, was told to ignore some of them.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    # A worker that loads data shares the socket: what it is told would be taken for told to this process.
    os.register_at_fork(after_in_child=_forget)
    threading.Thread(target=_listen, args=(heard,), name="signals", daemon=True).start()
    if "LOCAL_RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ:
        _end_with_launcher()


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Let a first signal inside only ask (`asked_signal`); a second one ends the process, as any outside does."""
    with _watch.lock:
        _watch.deferred, _watch.asked = True, None
    yield
    # Not after an error: it is on its way to be told, and the launcher's own signal must not come before it.
    with _watch.lock:
        _watch.deferred = False


def asked_signal() -> int | None:
    """Return the number of the signal that asked to stop, None where none came."""
    return _watch.asked


def wait_for_signal(seconds: float) -> bool:
    """Return whether a signal came before or within so many seconds; this process ends by itself, with its own code."""
    with _watch.lock:
        _watch.deferred = True
    until = time.monotonic() + seconds
    while _watch.asked is None and time.monotonic() < until:
        time.sleep(0.05)
    return _watch.asked is not None


def ignore_signals() -> None:
    """Ignore further signals: everything is saved, and a launcher ends the ranks that are slower to leave."""
    with suppress(ValueError):  # not the main thread
        for number in (*HANDLED, LAUNCHER_ENDED):
            signal.signal(number, signal.SIG_IGN)


def close_ears() -> None:
    """Ignore further signals, from any thread: the process is about to end with a code of its own."""
    _watch.closed = True


def signal_name(number: int) -> str:
    """Return a name such as SIGTERM."""
    if number == LAUNCHER_ENDED:
        return "the end of its launcher"
    return signal.Signals(number).name


def _listen(heard: socket.socket) -> None:
    handled = {int(number) for number in (*HANDLED, LAUNCHER_ENDED)}
    while told := heard.recv(64):
        for number in told:
            if number in handled:
                _act(number)


def _act(number: int) -> None:
    with _watch.lock:
        if _watch.closed:
            return
        if not _watch.deferred:
            _leave(number, "before training began or after it ended; run the same command again", EXIT_INTERRUPTED)
        if _watch.asked is not None and number == LAUNCHER_ENDED:
            return
        if _watch.asked is not None:
            _leave(number, "a second time and ended at once; the last checkpoint stands", 128 + number)
        _watch.asked = number


def _leave(number: int, what: str, code: int) -> None:
    """End this process without unwinding: the main thread may hang, and all that is half written lies beside."""
    with suppress(OSError, ValueError):
        if os.environ.get("RANK", "0") == "0":
            os.write(sys.stderr.fileno(), f"interrupted by {signal_name(number)} {what}\n".encode())
    os._exit(code)


def _forget() -> None:
    """In a forked child: hear nothing, and end as other programs do."""
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)
        for number in HANDLED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
    _watch.reset()  # its lock may have been held


def _end_with_launcher() -> None:
    """Have the kernel tell when the launcher dies, which may forward nothing, or be killed."""
    import ctypes

    signal.signal(LAUNCHER_ENDED, lambda *_: None)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(LAUNCHER_ENDED))
