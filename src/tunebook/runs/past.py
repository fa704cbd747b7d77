"""Run folders as they were left, read to be looked at: completed, interrupted, failed or still going on."""

import fcntl
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebook.errors import Problem, Refused
from tunebook.runs.folder import SUMMARY, read_summary
from tunebook.runs.lock import LOCK

Event = Mapping[str, Any]
MOST_STEPS = 2**53  # which a float tells apart; no run has as many


@dataclass(frozen=True)
class PastRun:
    """A run as far as it went.

    `name` tells it apart from the other runs it is shown with. `status` is that of run_summary.json, or `broken off`
    where the run says `running` and nobody runs it. `recipe` holds the values by dotted key, as they were run; `events`
    are the lines of metrics.jsonl in the order of their steps, one for each step and kind; `rows` is rows.json. What is
    not there, or cannot be read, is empty.
    """

    name: str
    folder: Path
    status: str
    summary: Mapping[str, Any]
    plan: Mapping[str, Any]
    recipe: Mapping[str, Any]
    events: tuple[Event, ...]
    rows: Mapping[str, Any]

    def curve(self, key: str) -> list[tuple[int, float]]:
        """Return (step, value) for each event that has a number of that name; it may be NaN or infinite."""
        return [(event["step"], _as_float(event[key])) for event in self.events if _is_number(event.get(key))]


def read_past_runs(folders: Sequence[str]) -> list[PastRun]:
    """Read run folders, each once. Raises Refused naming every folder that holds no run."""
    places = list({Path(folder).resolve(): Path(folder) for folder in folders}.values())
    fix = "Name a run folder, such as runs/tiny_qlora"
    problems = [Problem(f"no {SUMMARY} there", fix, str(place)) for place in places if read_summary(place) is None]
    if problems:
        raise Refused(problems)
    names = _distinct_names([place.resolve() for place in places])
    return [_read_past_run(place, name) for place, name in zip(places, names, strict=True)]


def read_resolved(folder: Path) -> dict[str, Any]:
    """Return the values of the one recipe in a run folder by dotted key, unchecked: other versions wrote it, maybe."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    recipes = sorted(folder.glob("*.yaml"))
    if len(recipes) != 1:
        return {}
    try:
        values = YAML(typ="safe", pure=True).load(recipes[0].read_text(encoding="utf-8"))
        json.dumps(values, default=str)  # which tells what holds itself, by an anchor
    except (OSError, ValueError, TypeError, RecursionError, YAMLError):
        return {}
    is_recipe = isinstance(values, Mapping) and all(isinstance(name, str) for name in values)
    return by_key(values) if is_recipe else {}


def by_key(values: Mapping[Any, Any], section: str = "") -> dict[str, Any]:
    """Return nested values by their dotted keys."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{section}{name}"
        found |= by_key(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value}
    return found


def is_going_on(folder: Path) -> bool:
    """Return whether a run holds its folder. Asked for with a shared lock, given back at once."""
    try:
        with (folder / LOCK).open("r") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def explain_unfinished(folder: Path, summary: Mapping[str, Any]) -> str:
    """Return why a run that is not completed has no adapter."""
    status = summary.get("status")
    if status == "running":
        return (
            "the run is going on, and has no adapter yet"
            if is_going_on(folder)
            else "the run broke off, and left no adapter"
        )
    return f"the run is {status}, and left no adapter"


def _read_past_run(folder: Path, name: str) -> PastRun:
    summary = read_summary(folder) or {}
    status = str(summary.get("status"))
    if status == "running" and not is_going_on(folder):
        status = "broken off"
    return PastRun(
        name=name,
        folder=folder,
        status=status,
        summary=summary,
        plan=_read_mapping(folder / "plan.json"),
        recipe=read_resolved(folder),
        events=tuple(_read_events(folder / "metrics.jsonl")),
        rows=_read_mapping(folder / "rows.json"),
    )


def _read_events(path: Path) -> list[Event]:
    """Return the events by step; of one that was written twice, by two lives of the run, the later."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found: dict[tuple[int, bool], Event] = {}
    for line in lines:
        try:
            event = json.loads(line)
            step = int(event["step"])
            if abs(step) < MOST_STEPS:
                found[step, "eval_loss" in event] = {**event, "step": step}
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue  # the line that was being written when the run was killed
    return [found[place] for place in sorted(found)]


def _read_mapping(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return each folder's name, with as many of those above it, up to the current folder, as tell them apart.

    What lies above the current folder, or elsewhere, says where this machine keeps things: such runs are numbered.
    """
    here = Path.cwd().resolve()
    known = [folder.relative_to(here).parts if folder.is_relative_to(here) else folder.parts[-1:] for folder in folders]
    names = [""] * len(folders)
    for depth in range(1, max(len(parts) for parts in known) + 1):
        names = ["/".join(parts[-depth:]) or folder.name for parts, folder in zip(known, folders, strict=True)]
        if len(set(names)) == len(names):
            return names
    return [name if names.count(name) == 1 else f"{name} ({place + 1})" for place, name in enumerate(names)]


def _as_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
