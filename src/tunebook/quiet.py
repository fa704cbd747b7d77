"""Keeps what the libraries say about themselves off the user's terminal.

What a user can act on is checked by tunebook and said in its own words.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator

LIBRARIES = ("transformers", "peft", "bitsandbytes", "accelerate", "datasets", "torch")

# Said while bitsandbytes is imported (by peft, by Trainer): that an optional CPU kernel is not installed.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


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
