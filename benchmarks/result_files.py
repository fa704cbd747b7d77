"""The files of results: whole or as they were, whenever the program or the disk ends."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write a file of results; where that fails, what was measured is printed, and one line ends the program."""
    # Not before: trl_preparation.py imports data_speed.py in an environment where tunebook is not to be had.
    from tunebook.system.writing import explain_unwritten, write_whole

    try:
        write_whole(path, text)
    except OSError as error:
        print(text, flush=True)
        raise SystemExit(explain_unwritten(error, path)) from error


def write_json(path: Path, found: Mapping[str, Any]) -> None:
    """Write results as JSON, as `write_text` does."""
    write_text(path, json.dumps(found, indent=1) + "\n")
