"""Keeps what the libraries say about themselves off the user's terminal.

What a user can act on is checked by tunebook and said in its own words.
"""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator

LIBRARIES = ("transformers", "peft", "bitsandbytes", "accelerate", "datasets", "torch")

# Said while bitsandbytes is imported (by peft, by Trainer): that an optional CPU kernel is not installed.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


class OneWordOnTheHub(logging.Handler):
    """Says once that the Hub is waited for, where huggingface_hub writes two lines for each of its attempts."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said = False
        self.purpose, self.limit = "", "a minute"

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line by rank 0: the first of an attempt that failed, and any that is about something else."""
        text = record.getMessage()
        reason, is_failure, _ = text.partition(" thrown while requesting ")
        is_repeated = self.said and (is_failure or text.startswith("Retrying in "))
        if is_repeated or os.environ.get("RANK", "0") != "0":
            return
        if is_failure:
            self.said = True
            text = f"it does not answer ({reason}); trying again, for {self.limit} at most"
        asked = f", asked {self.purpose}" if self.purpose else ""
        print(f"the Hub{asked}: {text}", file=sys.stderr, flush=True)


# Its requests are repeated five times, with pauses of 23 s in all (huggingface_hub 2.4, utils/_http.py).
_HUB_REQUESTS = logging.getLogger("huggingface_hub.utils._http")
_ONE_WORD = OneWordOnTheHub()
_HUB_REQUESTS.addHandler(_ONE_WORD)
_HUB_REQUESTS.propagate = False


@contextlib.contextmanager
def hub_asked(purpose: str, limit: str) -> Iterator[None]:
    """Have a Hub that does not answer named with what it is asked for, and with how long it is tried."""
    said, before = _ONE_WORD.said, (_ONE_WORD.purpose, _ONE_WORD.limit)
    _ONE_WORD.said, _ONE_WORD.purpose, _ONE_WORD.limit = False, purpose, limit
    try:
        yield
    finally:
        _ONE_WORD.said = said
        _ONE_WORD.purpose, _ONE_WORD.limit = before


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hide progress bars, log lines and warnings of the libraries, then restore what was before."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            for library in LIBRARIES:
                warnings.filterwarnings("ignore", module=rf"{library}(\.|$)")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
