"""What can only be known on a GPU, in one command of under 8 minutes.

python benchmarks/gpu.py            on the first GPU; writes benchmarks/results/gpu.md and gpu.json
python benchmarks/gpu.py --tiny     the same from end to end on any machine, to find typing mistakes; writes where --out
                                    says, which may hold no results of a real model, or nothing

A model of Qwen2.5-7B's shape with random weights in NF4, LoRA of rank 16 on all linear layers. First loss and gradient
on a small shape against float32, then tokens a second, peak memory and the share of the GPU's rate for each setting,
and that memory against the plan's. A setting whose first step is not that of the others on the same rows is marked.
Nothing is downloaded or installed; what is missing is named, with exit code 2.
"""

import argparse
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

# Nothing that may be missing is imported before it was looked for.

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
NO_NEW_CELL, STOPPED = 440, 470  # seconds from the start: after them no cell begins, and the process ends
EXIT_REFUSED = 2
FILES = ("gpu.json", "gpu.md")
# Of what setup.cfg asks for, what only commands, data and cards use.
NOT_USED = ("datasets", "jinja2", "pillow", "pyarrow", "rich", "typer")


def read_requirements(path: Path = HERE.parent / "setup.cfg") -> list[str]:
    """Return what setup.cfg asks for and this benchmark uses, such as `torch>=2.13,<2.15`."""
    found = ConfigParser(interpolation=None)
    found.read_string(path.read_text(encoding="utf-8"))
    asked = found["options"]["install_requires"].split()
    return [one for one in asked if re.split("[<>=]", one)[0] not in NOT_USED]


def tell_missing(requirements: list[str], version_of: Callable[[str], str] = version) -> str | None:
    """Return one line that names all that is not installed or too old, and what installs it; None where all is here."""
    told, fixes = [], []
    for one in requirements:
        name, least = re.split("[<>=]+", one)[:2]
        try:
            there = version_of(name)
        except PackageNotFoundError:
            told.append(f"{name} is not installed")
            fixes.append(f"'{one}'")
            continue
        if _numbers(there) < _numbers(least):
            told.append(f"{name} {there} is too old")
            fixes.append(f"'{one}'")
    if find_spec("tunebook") is None:
        told, fixes = [*told, "tunebook is not installed"], [f"-e '{HERE.parent}'"]  # which brings the rest
    return f"{', '.join(told)}. Run: pip install {' '.join(fixes)}" if told else None


def _numbers(text: str) -> list[int]:
    """Return the numbers that a version begins with; 2.13.0+cu130 is 2, 13, 0."""
    return [int(number) for number in re.findall(r"\d+", re.match(r"[\d.]*", text).group())]  # type: ignore[union-attr]


def stop_after(seconds: float, message: str) -> None:
    """Say so and end the process after so many seconds, whatever it does then: nothing bounds a compilation."""

    def stop() -> None:
        print(message, file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()


def holds_real_results(folder: Path) -> bool:
    """Return whether a folder holds results that are not known to be of the tiny model; --tiny may not write there."""
    text, table = (folder / name for name in FILES)
    try:
        kept = json.loads(text.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return table.exists()
    except (OSError, ValueError):
        return True  # who knows of which
    return not (isinstance(kept, dict) and kept.get("tiny") is True)


def read_arguments() -> argparse.Namespace:
    """Return the command line, `out` being None where nothing is written; what is needed is there, else exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on any machine")
    parser.add_argument(
        "--out", type=Path, help="the folder of gpu.md and gpu.json (benchmarks/results without --tiny)"
    )
    given = parser.parse_args()
    if missing := tell_missing(read_requirements()):
        parser.exit(EXIT_REFUSED, f"{missing}\n")
    given.out = given.out or (None if given.tiny else RESULTS)
    if given.out is not None:
        from arguments import check_results

        check_results(parser, "--out", given.out, FILES)
        if given.tiny and holds_real_results(given.out):
            parser.error(f"--tiny: {given.out} holds the results of a real model; give another --out")
    return given


def main() -> int:
    """Check, measure, print, and write the results; return the exit code."""
    began, given = time.monotonic(), read_arguments()
    stop_after(STOPPED, f"Stopped after {STOPPED} seconds; the results hold what was measured until then")
    import torch

    from gpu_bench import Bench, measure_all
    from gpu_checks import check_small_model
    from gpu_model import QWEN_7B, TINY
    from gpu_results import Results
    from gpu_settings import settings

    if not given.tiny and not torch.cuda.is_available():
        print("No GPU is here. --tiny runs everything on the CPU, with a tiny model", file=sys.stderr)
        return EXIT_REFUSED
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device != "cpu" else torch.float32  # which is four times faster there
    shape, check = TINY if given.tiny else QWEN_7B, check_small_model(device)
    results = Results(given.out, device, str(dtype), shape, check)
    print(f"small NF4 model against float32: {results.check}", flush=True)
    bench = Bench(shape, device, dtype, began + NO_NEW_CELL)
    measure_all(bench, settings((64, 128), 256) if given.tiny else settings((512, 2048), 8192), results)
    print(results.render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
