"""How a past run and the same run here and now differ: in what it depends on, and in what came out."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tunebook.runs.identity import Identity
from tunebook.runs.past import PastRun
from tunebook.system.hardware import name_hardware

CONTENTS = {"data": "data fingerprint", "tokenizer": "tokenizer", "base model": "base"}


@dataclass(frozen=True)
class Difference:
    """One thing that is otherwise here. `decides` tells that it makes another run of it, not the same one elsewhere."""

    what: str
    there: str
    here: str
    decides: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.there} there, {self.here} here"


def find_surroundings(past: PastRun, device: str, num_processes: int) -> tuple[list[Difference], list[str]]:
    """Return what differs around the run, and what was compared and is the same: packages, device, processes."""
    summary = past.summary
    here: dict[str, str] = {"device": device, "hardware": name_hardware(device), "processes": str(num_processes)}
    there = {
        "device": summary.get("device"),
        "hardware": summary.get("hardware"),
        "processes": summary.get("world_size"),
    }
    versions = summary.get("versions")
    for name, value in (versions if isinstance(versions, Mapping) else {}).items():
        here[str(name)], there[str(name)] = _version(str(name)), value
    differences, same = [], []
    for name, value in there.items():
        if value is not None and str(value) != here[name]:
            differences.append(Difference(name, str(value), here[name]))
        elif value is not None:
            same.append(f"{name} {value}")
    return differences, same


def find_other_contents(begun: Identity, now: Identity, given: Sequence[str]) -> list[Difference]:
    """Return what makes another run of it: rows, base, tokenizer, or a value that the result depends on.

    `given` are the dotted keys of the command line. A key that the past run's version did not know of is not compared,
    unless it was given.
    """
    differences = []
    for key in sorted(begun.keys() | now.keys()):
        is_known = key in begun or key in given or key.startswith("training.")
        if is_known and begun.get(key) != now.get(key):
            there, here = (_shown(one.get(key)) for one in (begun, now))
            differences.append(Difference(CONTENTS.get(key, key), there, here, decides=True))
    return differences


def compare_results(there: PastRun, here: PastRun) -> list[str]:
    """Return what came out here beside what came out there, a line each: the adapter, then the losses."""
    return [*_compare_adapters(there, here), *_compare_losses(there, here)]


def _compare_adapters(there: PastRun, here: PastRun) -> list[str]:
    hashes = [run.summary.get("adapter_sha256") for run in (there, here)]
    if None in hashes:
        done = max((event["step"] for event in there.events), default=0)
        return [f"no adapter to compare with: the run there is {there.status}, after step {done}"]
    if hashes[0] == hashes[1]:
        return ["the same adapter, bit for bit"]
    difference = _largest_difference(there, here)
    if difference is None:
        return ["another adapter; that of the run there is gone, so how far it is off is not known"]
    return [f"not the same bits: the weights differ by at most {difference:.2g}"]


def _largest_difference(there: PastRun, here: PastRun) -> float | None:
    """Return the largest difference between two weights of the same name; None where either is missing or unlike."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: list[dict[str, Any]] = [{}, {}]
    for found, run in zip(tensors, (there, here), strict=True):
        try:
            for path in sorted((run.folder / "adapter").glob("*.safetensors")):
                found.update(load_file(path))
        except (OSError, SafetensorError):
            return None
    one, other = tensors
    if not one or {name: weight.shape for name, weight in one.items()} != {
        name: weight.shape for name, weight in other.items()
    }:
        return None
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


def _compare_losses(there: PastRun, here: PastRun) -> list[str]:
    lines = []
    for key, what in (("loss", "loss"), ("eval_loss", "held-out loss")):
        curves = [dict(run.curve(key)) for run in (there, here)]
        if shared := sorted(curves[0].keys() & curves[1].keys()):
            before, now = (curve[shared[-1]] for curve in curves)
            off = "equal" if before == now else f"off by {abs(now - before):.2g}"
            lines.append(f"{what} at step {shared[-1]:,}: {before:.6g} there, {now:.6g} here, {off}")
    return lines


def _version(package: str) -> str:
    if package == "python":
        return platform.python_version()
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    text = str(value)
    return text[:12] if len(text) == 64 and set(text) <= set("0123456789abcdef") else text
