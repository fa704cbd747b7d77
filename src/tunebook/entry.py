"""What stands around the story of a rank: its command line, and the exit code and the one message it ends with."""

import os
import sys
import time
from collections.abc import Callable

from tunebook.command_line import Command, read_command
from tunebook.errors import EXIT_FAILED, Refused, TrainingFailed
from tunebook.refusal import exit_refused

# The launcher ends the other ranks about 0.3 s after one has left.
SECONDS_FOR_RANK_0 = 2.0


def run_rank(story: Callable[[Command], None]) -> None:
    """Run `story` with the command line; a refusal ends in exit code 2, a failure that is understood in 1.

    Neither shows a traceback. An error that is not understood keeps its traceback, which is all there is to go by.
    """
    try:
        story(read_command(sys.argv[1:]))
    except Refused as refused:
        exit_refused(refused)
    except TrainingFailed as failure:
        say_failed(failure, int(os.environ.get("RANK", "0")))
        sys.exit(EXIT_FAILED)


def say_failed(failure: TrainingFailed, rank: int) -> None:
    """Print why training failed, once where all ranks know it: rank 0 speaks for all.

    What one rank alone may have met it says itself, unless rank 0 has met it too: rank 0's exit makes the launcher end
    the others before their wait is over.
    """
    if rank == 0:
        print(f"failed: {failure}", file=sys.stderr, flush=True)
    elif not failure.on_every_rank:
        time.sleep(SECONDS_FOR_RANK_0)
        print(f"failed: rank {rank}: {failure}", file=sys.stderr, flush=True)
