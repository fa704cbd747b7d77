"""What a run costs: seconds spent training, tokens, and the peak of memory."""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SAMPLE_SECONDS = 0.1


class Stopwatch:
    """Counts seconds between `start` and `stop`, without those inside `paused`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds counted so far."""
        return self._seconds + (time.perf_counter() - self._since if self._since is not None else 0.0)

    def start(self) -> None:
        """Begin, or go on, counting."""
        self._since = time.perf_counter()

    def add(self, seconds: float) -> None:
        """Count seconds of an earlier life of the run."""
        self._seconds += seconds

    def stop(self) -> None:
        """Stop counting; does nothing when it doesn't run."""
        self._seconds, self._since = self.seconds, None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Don't count what happens inside, such as an evaluation or the saving of a checkpoint."""
        runs = self._since is not None
        self.stop()
        try:
            yield
        finally:
            if runs:
                self.start()


class Pace:
    """Trained tokens a second over all processes since the last reading, by a clock that leaves out evaluation."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._num_labels: Any = 0
        self._since = 0.0

    def begin(self) -> None:
        """Count from now on, which after a checkpoint is not the start of the clock."""
        self._num_labels, self._since = 0, self._stopwatch.seconds

    def count(self, num_labels: Any) -> None:
        """Add the labels of a step, a number or a tensor that stays on its device; None where they are not counted."""
        if num_labels is not None:
            self._num_labels = self._num_labels + num_labels

    def read(self) -> float | None:
        """Return tokens a second since the last reading, None where nothing was counted; waits for the device."""
        num_labels, seconds = float(self._num_labels), self._stopwatch.seconds - self._since
        self.begin()
        return num_labels / seconds if num_labels and seconds > 0 else None


@dataclass
class TokenCounts:
    """Tokens that went through the model in training on this process.

    `processed` counts every position, `padded` those that hold no token of a row, `trained` the labels that count.
    """

    processed: int = 0
    padded: int = 0
    trained: int = 0

    def count(self, micro_batch: Mapping[str, Any]) -> None:
        """Add a micro-batch as `pad_right` or `join_rows` makes it, by its shape alone, without touching the device."""
        self.processed += micro_batch["input_ids"].numel()
        self.padded += micro_batch["input_ids"].numel() - micro_batch["num_row_tokens"]
        self.trained += micro_batch["num_trained_tokens"]


class PeakMemory:
    """The most memory that this process held at once, from its making to `stop`.

    On a GPU what torch allocated there. On a CPU RssAnon of /proc/self/status, read ten times a second by a thread of
    its own: resident memory as a whole would count the mapped model file. None where there is no such file.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._peak: int | None = None
        self._done = threading.Event()
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats(device)
        else:
            threading.Thread(target=self._sample, name="peak-memory", daemon=True).start()

    def stop(self) -> int | None:
        """End the sampling and return the peak in bytes."""
        self._done.set()
        return self.read()

    def read(self) -> int | None:
        """Return the peak so far in bytes; neither this nor the sampling makes a GPU wait."""
        if self._device.startswith("cuda"):
            return int(torch.cuda.max_memory_allocated(self._device))
        self._look()
        return self._peak

    def _sample(self) -> None:
        while not self._done.is_set():
            self._look()
            self._done.wait(SAMPLE_SECONDS)

    def _look(self) -> None:
        now = anonymous_bytes()
        if now is not None:
            self._peak = max(self._peak or 0, now)


def anonymous_bytes() -> int | None:
    """Return this process's RssAnon in bytes, or None where the system doesn't tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return None
