"""What stands around the story of a rank: its command line, and the exit code and the one message it ends with."""

import os
import sys
from collections.abc import Callable

from tunebook.command_line import Command, read_command
from tunebook.errors import EXIT_FAILED, Refused, TrainingFailed
from tunebook.refusal import exit_refused


def run_rank(story: Callable[[Command], None]) -> None:
    """Run `story` with the command line; a refusal ends in exit code 2, a failure that is understood in 1.

    Neither shows a traceback. An error that is not understood keeps its traceback, which is all there is to go by.
    """
    try:
        story(read_command(sys.argv[1:]))
    except Refused as refused:
        exit_refused(refused)
    except TrainingFailed as failure:
        # Every rank raises it at the same step; rank 0 speaks for all.
        if os.environ.get("RANK", "0") == "0":
            print(f"failed: {failure}", file=sys.stderr, flush=True)
        sys.exit(EXIT_FAILED)
