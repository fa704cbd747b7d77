"""What stands around the story of a rank: its command line, and the exit code and the one message it ends with."""

import errno
import os
import sys
from collections.abc import Callable

from tunebook.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_UNPUBLISHED,
    PEER_ENDED,
    SECONDS_FOR_FAILED_RANK,
    SECONDS_FOR_RANK_0,
    Interrupted,
    NotPublished,
    Refused,
    TrainingFailed,
    is_peer_gone,
    refuse_name,
)
from tunebook.launching.command_line import Command, read_command
from tunebook.launching.refusal import exit_refused
from tunebook.system.collection import put_off_collection
from tunebook.system.signals import wait_for_signal, watch_signals


def run_rank(story: Callable[[Command], None]) -> None:
    """Run `story` with the command line; a refusal ends in exit code 2, a failure that is understood in 1.

    What was trained and could not be published ends in 3. None of them shows a traceback. An error that is not
    understood keeps its own, which is all there is to go by. A signal ends it in 75: at once before training, after a
    checkpoint was saved in it.
    """
    watch_signals()
    put_off_collection()
    try:
        story(read_command(sys.argv[1:], f"{story.__name__}.py"))
    except Refused as refused:
        exit_refused(refused)
    except TrainingFailed as failure:
        if failure.befell != "another rank":
            _tell_launcher(failure)
        say_failed(failure, int(os.environ.get("RANK", "0")))
        sys.exit(EXIT_FAILED)
    except NotPublished as unpublished:
        print(unpublished, file=sys.stderr, flush=True)  # rank 0 alone publishes
        sys.exit(EXIT_UNPUBLISHED)
    except Interrupted as interrupted:
        if os.environ.get("RANK", "0") == "0":
            print(interrupted, file=sys.stderr, flush=True)
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            exit_refused(refuse_name(error))
        if is_peer_gone(error):  # before training began
            wait_for_signal(SECONDS_FOR_FAILED_RANK)
            say_failed(TrainingFailed(PEER_ENDED, befell="another rank"), int(os.environ.get("RANK", "0")))
            sys.exit(EXIT_FAILED)
        _tell_launcher(error)
        raise


def say_failed(failure: TrainingFailed, rank: int) -> None:
    """Print why training failed, once where all ranks know it: rank 0 speaks for all.

    What befell one rank that rank says itself, unless rank 0 met it too: rank 0's exit then makes the launcher signal
    the others before their wait is over.
    """
    if rank == 0:
        print(f"failed: {failure}", file=sys.stderr, flush=True)
    elif failure.befell == "this rank" and not wait_for_signal(SECONDS_FOR_RANK_0):
        print(f"failed: rank {rank}: {failure}", file=sys.stderr, flush=True)


def _tell_launcher(error: Exception) -> None:
    """Leave the error where torchrun and accelerate look for the root cause that they show last.

    It is what torch's `record` does; as a decorator of the entry it would import torch before a recipe is accepted.
    """
    if "torch" in sys.modules and "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
