"""Where and when a result came about: machine, load, date, commit, command and versions; no place of this machine."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("tunebook", "torch", "transformers", "peft", "accelerate", "bitsandbytes")
RESULTS = "benchmarks/results"


def where_and_when(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a result is worth nothing without, as JSON; `packages` are named beside those of every benchmark.

    The load average is that before the measurement. `commit` is None outside a git checkout.
    """
    commit = find_commit(ROOT)
    return {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", *map(without_place, sys.argv)]),
        "commit": commit[0] if commit else None,
        "uncommitted_changes": commit[1] if commit else None,
        "machine": {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "load_average": os.getloadavg()},
        "versions": {"python": platform.python_version()} | versions_of((*PACKAGES, *packages)),
    }


def cpu_name() -> str:
    """Return the processor's own name where the system tells."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def versions_of(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def find_commit(checkout: Path) -> tuple[str, bool] | None:
    """Return the commit of a checkout and whether its files differ from it, results aside; None where git has none."""
    ours, *lines = _git(checkout, "rev-parse", "--show-prefix", "HEAD") or ["no checkout"]
    if ours or not lines:  # files that were unpacked inside of another checkout have a prefix there
        return None
    return lines[0], bool(_git(checkout, "status", "--porcelain", "--", ".", f":!{RESULTS}"))


def _git(checkout: Path, *words: str) -> list[str]:
    """Return the lines that git says; none where it is missing or refuses."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # a hook's checkout
    try:
        said = subprocess.run(
            ["git", "-C", str(checkout), *words], env=environ, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return []
    return said.stdout.splitlines() if said.returncode == 0 else []


def without_place(word: str) -> str:
    """Return a word of a command line as it is typed in the checkout; of a path elsewhere the name alone."""
    option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    if "/" in value or (value and Path(value).exists()):
        path = Path(os.path.normpath(Path.cwd() / value))
        value = path.name
        if path.is_relative_to(ROOT):
            value = str(path.relative_to(ROOT))
        elif path.is_relative_to(ROOT.parent / "shared"):
            value = str(Path("..") / path.relative_to(ROOT.parent))
    return option + equals + value
