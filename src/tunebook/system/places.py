"""Where a recipe's model and data are: a place on this machine or a Hub id, told apart without touching the network.

Everything here looks at names and folders only, so it runs while the recipe is read, before torch or datasets load.
"""

import difflib
import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tunebook.errors import Problem

COMPRESSED = (".gz", ".zst")
_TEXT_SUFFIXES = (".json", ".jsonl", ".csv")
DATA_SUFFIXES = (
    *_TEXT_SUFFIXES,
    ".parquet",
    ".arrow",
    *(f"{text}{end}" for text in _TEXT_SUFFIXES for end in COMPRESSED),
)
_KINDS = ".json, .jsonl, .csv, .parquet or .arrow"
# Suffixes that say "this was meant as a file", though none of them is read.
_OTHER_FILE_SUFFIXES = (".tsv", ".txt", ".gz", ".zst", ".bz2", ".xz", ".zip", ".jinja", ".yaml", ".md")
# What `datasets` writes beside the Arrow files of a saved data set; no rows are in them.
_SAVED_WITH_ARROW = ("dataset_info.json", "state.json")
_PATTERN = re.compile(r"[*?\[]")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class DataFiles:
    """The data files of a local path in the order they are read, and one note for each entry that is left out."""

    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()


def is_local(name: str, suffixes: Sequence[str] = ()) -> bool:
    """Whether `name` means a place on this machine rather than a Hub id.

    A Hub id is `name` or `owner/name`, so anything that exists here, starts like a path (`/ ./ ../ ~`), has more than
    one slash or ends in one of `suffixes` is local.
    """
    return (
        name.startswith(("/", "./", "../", "~"))
        or name in (".", "..")
        or name.count("/") > 1
        or name.lower().endswith(tuple(suffixes))
        or bool(_PATTERN.search(name))
        or local_path(name).exists()
    )


def data_suffix(file: Path) -> str:
    """Return what says how a data file is read, such as `.parquet` or `.jsonl.gz`; "" if none of ours."""
    name = file.name.lower()
    return max((suffix for suffix in DATA_SUFFIXES if name.endswith(suffix)), key=len, default="")


def is_local_data(path: str) -> bool:
    """Whether `data.path` means files on this machine rather than a data set of the Hub."""
    return is_local(path, DATA_SUFFIXES + _OTHER_FILE_SUFFIXES)


def local_path(name: str) -> Path:
    """Return `name` as a path, with a leading `~` replaced by the home folder and nothing else changed."""
    return Path(name).expanduser()


def list_data_files(path: str) -> DataFiles:
    """Return the data files of a local `data.path`: the file itself, a folder's files by name, or a pattern's by path.

    Hidden entries are ignored; other entries of a folder that are not data files are named in `notes`.
    """
    place = local_path(path)
    if _is_pattern(path):
        return DataFiles(tuple(sorted(_matches(path))))
    if not place.is_dir():
        return DataFiles((place,))
    entries = sorted((entry for entry in place.iterdir() if not entry.name.startswith(".")), key=lambda e: e.name)
    if any(data_suffix(entry) == ".arrow" for entry in entries):
        entries = [entry for entry in entries if entry.name not in _SAVED_WITH_ARROW]
    files = tuple(entry for entry in entries if entry.is_file() and data_suffix(entry))
    rest = [f"{entry.name}/" if entry.is_dir() else entry.name for entry in entries if entry not in files]
    notes = (f"{path}: not read, as no {_KINDS} file: {', '.join(rest)}",) if rest else ()
    return DataFiles(files, notes)


def _is_pattern(path: str) -> bool:
    return bool(_PATTERN.search(path)) and not local_path(path).exists()


def _matches(path: str) -> list[Path]:
    """Return the files that a pattern matches, folders and hidden ones left out; `**` goes through all folders."""
    found = glob.glob(str(local_path(path)), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
    return [Path(name) for name in found if Path(name).is_file()]


def check_data_path(path: str) -> list[Problem]:
    """Return what is wrong with `data.path` as far as names, folders and sizes tell; an empty list if nothing is."""
    if not is_local_data(path):
        return _check_hub_id(path, "data.path", f"a {_KINDS} file, a folder of them")
    place = local_path(path)
    if not place.exists() and not _is_pattern(path):
        kind = "file" if place.suffix else "file or folder"
        return [_missing(place, path, kind, "data.path")]
    return _check_listing(path, place)


def _check_listing(path: str, place: Path) -> list[Problem]:
    """Return what is wrong with the file, the folder's files or the files that match."""
    if place.is_dir():
        if not os.access(place, os.R_OK | os.X_OK):
            return [Problem(f"folder {path} can't be read: permission denied", key="data.path")]
        listing = list_data_files(path)
        if not listing.files:
            message = f"no {_KINDS} file in folder {path}"
            found = f"; it holds {', '.join(_names(place)) or 'nothing'}"
            return [Problem(message + found, "Name a file, or the folder that holds the data files", key="data.path")]
    files = list_data_files(path).files
    if not files:
        fix = f"Correct the pattern; it is relative to the current folder {Path.cwd()}"
        return [Problem(f"no file matches {path}", fix, key="data.path")]
    return [problem for file in files for problem in _check_data_file(file)]


def check_model_path(name_or_path: str) -> list[Problem]:
    """Return what is wrong with `model.name_or_path` as far as names and folders tell; an empty list if nothing is."""
    key = "model.name_or_path"
    if not is_local(name_or_path):
        return _check_hub_id(name_or_path, key, "a folder")
    place = local_path(name_or_path)
    if not place.exists():
        return [_missing(place, name_or_path, "folder", key)]
    if not place.is_dir():
        return [Problem(f"{name_or_path} is a file; a model is a folder with config.json and weights", key=key)]
    if (place / "config.json").is_file():
        return []
    message = f"no config.json in {name_or_path}"
    if (place / "adapter_config.json").is_file():
        return [Problem(f"{message}: it is an adapter", "Name the base model it was trained on", key=key)]
    found = f"It holds {', '.join(_names(place)) or 'nothing'}"
    return [Problem(message, f"{found}; name the folder with the model's config.json and weights", key=key)]


def _check_data_file(place: Path) -> list[Problem]:
    """Return what is wrong with one data file without reading more than its size."""
    key = "data.path"
    if not data_suffix(place):
        ending = place.suffix or "a file without a suffix"
        fix = f"Convert it to {_KINDS}; .gz and .zst may follow the first three"
        return [Problem(f"{place}: {ending} is not read", fix, key=key)]
    if not place.is_file():
        return [Problem(f"{place} is not a regular file", key=key)]
    if not os.access(place, os.R_OK):
        return [Problem(f"{place} can't be read: permission denied", key=key)]
    if place.stat().st_size == 0:
        return [Problem(f"no rows in {place}: the file is empty", key=key)]
    return []


def _check_hub_id(name: str, key: str, local_form: str) -> list[Problem]:
    folder = local_path(name).parent
    near = difflib.get_close_matches(local_path(name).name, _names(folder, slash=False), n=1, cutoff=0.75)
    if "/" in name and folder.is_dir() and near:
        # assets/tiny-qwen for assets/tiny-qwen2: asking the Hub for it would end in a network error, or in a stranger.
        return [Problem(f"{name} does not exist", f"The nearest name in {folder} is {near[0]}", key=key)]
    if _HUB_ID.fullmatch(name) and not name.endswith((".git", ".", "-")) and ".." not in name and "--" not in name:
        return []
    message = f"{name!r} is neither {local_form} on this machine, nor a Hub id such as owner/name"
    return [Problem(message, "Correct the name", key=key)]


def _missing(place: Path, written: str, kind: str, key: str) -> Problem:
    """Return the problem of a local path that does not exist, with the nearest name beside it."""
    parent = place.parent
    while not parent.exists():
        place, parent = parent, parent.parent
    near = difflib.get_close_matches(place.name, _names(parent, slash=False), n=1)
    if near:
        fix = f"The nearest name in {parent} is {near[0]}"
    elif Path(written).is_absolute() or written.startswith("~"):
        fix = "Correct the path"
    else:
        fix = f"Correct the path; it is relative to the current folder {Path.cwd()}"
    return Problem(f"{kind} {written} does not exist", fix, key=key)


def _names(folder: Path, slash: bool = True) -> list[str]:
    """Return up to ten entry names of a folder, folders with a slash, hidden ones left out."""
    try:
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError:
        return []
    if not slash:
        return [entry.name for entry in entries]
    names = [f"{entry.name}/" if entry.is_dir() else entry.name for entry in entries[:10]]
    return [*names, "..."] if len(entries) > 10 else names
