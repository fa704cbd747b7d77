"""What the benchmarks' command lines have in common: numbers that measure something, and a place for the results."""

import argparse
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile


def at_least(least: int) -> Callable[[str], int]:
    """Return what reads a whole number from a command line, and refuses a smaller one than `least`."""

    def read(word: str) -> int:
        if not (word.isascii() and word.isdecimal()) or int(word) < least:
            raise argparse.ArgumentTypeError(f"{word} is no whole number from {least} on")
        return int(word)

    return read


def check_results(parser: argparse.ArgumentParser, option: str, place: Path, names: tuple[str, ...] = ()) -> None:
    """End with exit code 2, before anything is measured, where results could not be written to `place`.

    That is a file or, where `names` says what is written into it, a folder. Makes the folder that it takes.
    """
    # Not before: trl_preparation.py imports data_speed.py in an environment where tunebook is not to be had.
    from tunebook.system.writing import find_fault_of_place

    folder = place if names else place.parent
    for file in (place / name for name in names) if names else (place,):
        if fault := find_fault_of_place(file) or ("is a folder" if file.is_dir() else ""):
            parser.error(f"{option}: {file} {fault}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):  # a disk that is only read tells so here, and nowhere before
            pass
    except (FileExistsError, NotADirectoryError):
        parser.error(f"{option}: {folder} is no folder")
    except OSError as error:
        parser.error(f"{option}: nothing can be written to {folder}: {error.strerror}")
