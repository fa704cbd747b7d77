"""How far this process has come: at which of the places where all ranks meet it arrived last.

Every rank comes by the same places in the same order, so the one with the fewest arrivals is the one that the others
wait for. Noting an arrival costs two assignments; `tunebook.system.watchdog` looks at it from a thread of its own.
"""

import sys
import threading
import traceback
from dataclasses import dataclass

NUM_FRAMES = 15


@dataclass
class Whereabouts:
    """The number of arrivals, the place of the last one in words, and the optimizer step (0: before the first)."""

    num_arrivals: int = 0
    place: str = "the start"
    step: int = 0


here = Whereabouts()


def arrive(place: str) -> None:
    """Note that this process has come to a place where it meets all others; called just before it waits for them."""
    here.place = place
    here.num_arrivals += 1


def begin_step(step: int) -> None:
    """Note that this process begins an optimizer step."""
    here.step = step


def main_stack() -> str:
    """Return where the main thread stands now, innermost call last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)[-NUM_FRAMES:]) if frame is not None else ""
