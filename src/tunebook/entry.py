"""What stands around the story of a rank: its command line, and the exit code and the one message it ends with."""

import os
import sys
from collections.abc import Callable

from tunebook.command_line import Command, read_command
from tunebook.errors import EXIT_FAILED, EXIT_INTERRUPTED, Interrupted, Refused, TrainingFailed
from tunebook.refusal import exit_refused
from tunebook.signals import watch_signals


def run_rank(story: Callable[[Command], None]) -> None:
    """Run `story` with the command line; a refusal ends in exit code 2, a failure that is understood in 1.

    Neither shows a traceback. An error that is not understood keeps its traceback, which is all there is to go by. A
    signal ends it in 75: at once before training, after a checkpoint was saved in it.
    """
    watch_signals()
    try:
        story(read_command(sys.argv[1:]))
    except Refused as refused:
        exit_refused(refused)
    except TrainingFailed as failure:
        if failure.befell != "another rank":
            _tell_launcher(failure)
        # Every rank raises it at the same step and rank 0 speaks for all, but for what befell one rank alone.
        rank = os.environ.get("RANK", "0")
        if rank == "0" or failure.befell == "this rank":
            print(f"{'' if rank == '0' else f'rank {rank}: '}failed: {failure}", file=sys.stderr, flush=True)
        sys.exit(EXIT_FAILED)
    except Interrupted as interrupted:
        if os.environ.get("RANK", "0") == "0":
            print(interrupted, file=sys.stderr, flush=True)
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        _tell_launcher(error)
        raise


def _tell_launcher(error: Exception) -> None:
    """Leave the error where torchrun and accelerate look for the root cause that they show last.

    It is what torch's `record` does; as a decorator of the entry it would import torch before a recipe is accepted.
    """
    if "torch" in sys.modules and "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
