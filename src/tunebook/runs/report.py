"""`tunebook report`: one HTML page that shows runs side by side, with nothing to load and no script in it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunebook import __version__
from tunebook.errors import Problem, Refused
from tunebook.runs.charts import BOTTOM, HEIGHT, LEFT, RIGHT, WIDTH, Chart, build_curves, build_histogram, is_drawable
from tunebook.runs.facts import collect_facts, collect_samples, collect_shares, compare_recipes, memory_unit
from tunebook.runs.past import PastRun, read_past_runs
from tunebook.system.writing import find_fault_of_place, write_whole

# By this a page of ours is known, which may be written over.
MARK = '<meta name="generator" content="tunebook report">'
# What is drawn over steps: key of metrics.jsonl, title, unit.
CURVES = (
    ("loss", "Loss", ""),
    ("eval_loss", "Held-out loss", ""),
    ("learning_rate", "Learning rate", ""),
    ("grad_norm", "Gradient norm", ""),
    ("tokens_per_second", "Trained tokens a second, all processes", ""),
    ("eval_token_accuracy", "Right tokens held out", "%"),
)
NUM_BEFORE_MEMORY = 5  # charts in front of that of memory, whose unit depends on the amounts
NUM_COLOURS = 8
# Control characters by those that picture them; line ends and tabs stay. Those without a picture, and those that turn
# the direction of a text or are not seen at all, by their number. Joiners stay: scripts and emoji need them.
UNSEEN = (*range(0x80, 0xA0), 0x61C, 0x180E, 0x200B, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2060, 0x2070))
PICTURES: dict[int, int | str] = {
    **{code: f"[U+{code:04X}]" for code in (*UNSEEN, 0xAD, 0xFEFF, *range(0xFFF9, 0xFFFC))},
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    127: 0x2421,
}


def write_report(run_dirs: Sequence[str], out: str) -> Path:
    """Write the page about some run folders to `out` and return its place; an earlier page there is replaced.

    Raises Refused, with nothing written, where a folder holds no run or `out` is something else than a page of ours.
    """
    place = Path(out)
    check_place(place)
    page = render_report(read_past_runs(run_dirs))
    try:
        write_whole(place, page)
    except OSError as error:
        fix = "Name another place by --out FILE.html"
        raise Refused(Problem(f"cannot be written: {error.strerror}", fix, str(place))) from error
    return place


def check_place(place: Path) -> None:
    """Raise Refused if what stands at a place is no report."""
    fix = "Name another place by --out FILE.html"
    if fault := find_fault_of_place(place):
        raise Refused(Problem(fault, fix, str(place)))
    if place.is_dir():
        raise Refused(Problem("is a folder, and the report is one file", fix, str(place)))
    if not place.exists():
        return
    try:
        with place.open("r", encoding="utf-8", errors="replace") as file:
            beginning = file.read(1000)
    except OSError as error:
        raise Refused(Problem(f"cannot be read: {error.strerror}", fix, str(place))) from error
    if MARK not in beginning:
        raise Refused(Problem("holds something that is no report of tunebook", fix, str(place)))


def render_report(runs: Sequence[PastRun]) -> str:
    """Return the page. Every text in it is escaped, and its own policy forbids scripts and loading."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("tunebook.runs"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = show_characters
    recipe = compare_recipes(runs)
    page = environment.get_template("report.html").render(
        mark=MARK,
        version=__version__,
        title=show_characters(", ".join(run.name for run in runs)),
        runs=runs,
        num_colours=NUM_COLOURS,
        facts=collect_facts(runs),
        charts=build_charts(runs),
        histograms=build_histograms(runs),
        shares=collect_shares(runs),
        samples=collect_samples(runs),
        different=[row for row in recipe if row.differs],
        recipe=recipe,
        without_recipe=[run.name for run in runs if not run.recipe],
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=WIDTH - RIGHT,
        bottom=HEIGHT - BOTTOM,
    )
    # Half of a character pair, which JSON can hold and UTF-8 cannot.
    return page.encode("utf-8", errors="replace").decode("utf-8")


def build_charts(runs: Sequence[PastRun]) -> list[Chart]:
    """Return a chart for each thing that is measured over steps, the runs' curves laid over each other."""
    charts = []
    for key, title, unit in CURVES:
        measured = [(number, run.name, run.curve(key)) for number, run in enumerate(runs)]
        scale = 0.01 if unit == "%" else 1.0
        charts.append(build_curves(title, measured, unit, scale))
    measured = [(number, run.name, run.curve("memory_bytes")) for number, run in enumerate(runs)]
    unit, scale = memory_unit(max((y for *_, points in measured for _, y in points if is_drawable(y)), default=0))
    charts.insert(NUM_BEFORE_MEMORY, build_curves("Peak memory so far, rank 0", measured, unit, scale))
    return charts


def build_histograms(runs: Sequence[PastRun]) -> list[tuple[list[int], Chart]]:
    """Return the histogram of each set of rows, with the numbers of the runs that trained on them."""
    found: dict[str, list[int]] = {}
    for number, run in enumerate(runs):
        found.setdefault(json.dumps(run.rows.get("lengths"), sort_keys=True), []).append(number)
    histograms = []
    for text, numbers in found.items():
        lengths: Any = json.loads(text)
        try:
            histograms.append((numbers, build_histogram("Rows by length", lengths)))
        except (KeyError, TypeError, ValueError, ArithmeticError):
            continue  # not recorded, or no numbers that rows have
    return histograms


def show_characters(text: str) -> str:
    """Return a text with its control characters made visible, those of direction too; line ends and tabs aside."""
    return text.translate(PICTURES)
