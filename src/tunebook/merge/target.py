"""Where a merged model may go and in which type: told from names and folders alone, before anything loads."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tunebook.errors import Problem, Refused
from tunebook.export.finished import Finished, explain_taken
from tunebook.system.writing import find_fault_of_place, folder_to_fill

MERGED_TYPES = ("bfloat16", "float16", "float32")
_QUANTISED = (
    "nf4",
    "fp4",
    "int4",
    "4bit",
    "4-bit",
    "int8",
    "8bit",
    "8-bit",
    "fp8",
    "float8",
    "q4",
    "q8",
    "gptq",
    "awq",
)
NEW_FOLDER = "Name a new folder, such as --out merged"
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def find_merge_problems(finished: Finished, target: Path, dtype: str | None) -> list[Problem]:
    """Return why nothing can be merged, or not there, or not in this type; `dtype` None stands for the base's own."""
    problems = []
    if dtype is not None and dtype not in MERGED_TYPES:
        problems.append(_explain_type(dtype))
    if finished.recipe.lora is None:
        fix = f"Use {finished.source}, which is the whole model"
        message = "nothing to merge: this run trained all weights, and has no adapter"
        problems.append(Problem(message, fix, str(finished.folder)))
    fault = find_fault_of_place(target)
    problem = (fault, NEW_FOLDER) if fault else _explain_target(target, finished)
    return problems if problem is None else [*problems, Problem(*problem, str(target))]


def _explain_type(dtype: str) -> Problem:
    word = dtype.lower()
    if any(word.startswith(name) for name in _QUANTISED):
        message = f"{dtype}: an adapter is never merged into quantised weights"
        fix = (
            "The sum would be rounded to the few values of its block once more, and answer worse than either part. "
            "Merge in one of the others, and quantise the merged model where it is loaded"
        )
        return Problem(message, fix, "--dtype")
    fix = f"Use {_SHORT[word]}" if word in _SHORT else f"Use one of {', '.join(MERGED_TYPES)}"
    return Problem(f"{dtype} is no type that weights are merged in", fix, "--dtype")


def _explain_target(target: Path, finished: Finished) -> tuple[str, str] | None:
    """Return what stands in the way of a merged model at `target`, and what to do."""
    fix, place = NEW_FOLDER, target.resolve()
    adapters = [folder for folder in (place, *place.parents) if (folder / "adapter_config.json").exists()]
    if adapters:
        return f"{'is' if adapters[0] == place else 'lies in'} the folder of an adapter", fix
    if taken := explain_taken(place, finished):
        return taken, fix
    if target.is_symlink() and not target.exists():
        return "is a link that leads nowhere", fix
    if target.exists() and not target.is_dir():
        return "is a file", fix
    try:
        is_filled = target.is_dir() and any(target.iterdir())
    except OSError as error:
        return f"cannot be looked into: {error.strerror}", fix
    return ("is not empty", f"{fix}, or empty it") if is_filled else None


def check_room(target: Path, num_bytes: int) -> None:
    """Raise Refused where the disk has no room for `num_bytes`."""
    free = shutil.disk_usage(next(parent for parent in target.resolve().parents if parent.exists())).free
    if free < num_bytes:
        needed = f"{render_bytes(num_bytes)} are needed there while it is made, and {render_bytes(free)} are free"
        raise Refused(Problem(needed, "Make room, or use --out on another disk", str(target)))


def render_bytes(number: int) -> str:
    """Return an amount in the largest unit of which there is one."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number >= 2**power:
            return f"{number / 2**power:,.2f} {unit}"
    return f"{number} bytes"


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Give an empty folder to fill that becomes `target`; after an error neither it nor parents made for it stay.

    Raises Refused where nothing can be written there.
    """
    place = target.resolve()
    made = [parent for parent in place.parents if not parent.exists()]
    try:
        with folder_to_fill(place) as beside:
            yield beside
    except BaseException as error:
        for parent in made:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        if isinstance(error, PermissionError | FileNotFoundError | NotADirectoryError) and error.filename:
            message = f"cannot be written: {error.strerror}"
            raise Refused(Problem(message, "Name a folder that can, by --out", str(target))) from error
        raise
