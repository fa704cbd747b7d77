"""The whole plan as people read it: compact on a terminal of 80 columns, one line each as plain text."""

from rich import box
from rich.console import Console
from rich.table import Table

from tunebook.plan.data_report import DataReport
from tunebook.plan.durations import Duration
from tunebook.plan.memory import GIB
from tunebook.plan.memory_plan import MemoryPlan
from tunebook.plan.row_view import render_rows
from tunebook.plan.table import build_console, print_notes, render_plan
from tunebook.plan.whole_plan import DataPart, WholePlan

PARTS = (
    ("weights", "weights"),
    ("constants", "quantisation constants"),
    ("adapter", "adapter"),
    ("gradients", "gradients"),
    ("optimizer", "optimizer"),
    ("activations", "activations"),
    ("logits", "logits"),
    ("workspace", "workspace"),
)
MOST_SOURCES = 10
MIB = 1024**2
FINDING_STYLES = {"warning": "yellow", "note": "dim"}


def show_whole_plan(whole: WholePlan) -> None:
    """Print the plan, then data, rows, memory, time, what is unknown, and the findings last, where they are seen."""
    console = build_console()
    print_notes(whole.plan.notes, console)
    console.print(render_plan(whole.plan))
    if whole.data is not None:
        console.print(render_data_table(whole.data))
        console.print(render_limits(whole.data.report))
        console.print(render_rows(whole.data.rows), soft_wrap=True)
    if whole.memory is not None:
        show_memory(whole.memory, console)
    if whole.duration is not None:
        _say(f"time: {render_duration(whole.duration)}", console)
    for line in whole.unknown:
        _say(f"unknown: {line}", console, "dim")
    for finding in whole.findings:
        if finding.kind != "error":  # errors are what the refusal says next
            _say(finding.render(), console, FINDING_STYLES[finding.kind])


def render_data_table(data: DataPart) -> Table:
    """Return the data in numbers, one thing a line."""
    report, padding = data.report, data.padding
    table = Table("data", "", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, num_rows in report.rows_by_source[:MOST_SOURCES]:
        table.add_row("rows", f"{num_rows:,} from {_plain(name)}")
    if len(report.rows_by_source) > MOST_SOURCES:
        rest = report.rows_by_source[MOST_SOURCES:]
        table.add_row("rows", f"{sum(count for _, count in rest):,} from {len(rest)} more")
    if report.forms:
        table.add_row("form", _plain("; ".join(report.forms)))
    if report.num_repeated_rows:
        table.add_row("added", f"{report.num_repeated_rows:,} repeated by weight")
    if report.num_split_rows:
        table.add_row("added", f"{report.num_split_rows:,} as conversations became several rows")
    table.add_row("used", f"{report.num_train_rows:,} to train, {report.num_eval_rows:,} held out")
    not_used = f"{report.num_bad_rows:,} quarantined, {report.num_dropped_rows:,} dropped for their length"
    table.add_row("not used", not_used)
    if report.num_duplicate_rows:
        table.add_row("not used", f"{report.num_duplicate_rows:,} like an earlier row")
    if report.num_unused_rows:
        table.add_row("not used", f"{report.num_unused_rows:,} not drawn from their source")
    equal = "too many rows to compare" if report.num_equal_rows is None else f"{report.num_equal_rows:,}"
    table.add_row("equal to an earlier row", equal)
    lengths = f"p50 {report.length_p50:,}, p95 {report.length_p95:,}, longest {report.length_max:,}"
    before = f" ({report.longest_row:,} before the cut)" if report.longest_row > report.length_max else ""
    table.add_row("tokens of a row", lengths + before)
    table.add_row("trained tokens", f"{report.trained_share:.1%} of {report.all_tokens:,} per epoch")
    table.add_row("prompts by", report.template)
    table.add_row("padding", f"{padding.share:.1%} of positions; {padding.random_share:.1%} in random batches")
    return table


def render_limits(report: DataReport) -> Table:
    """Return what several max_lengths do, the recipe's own among them."""
    table = Table("max_length", "rows cut", "rows dropped", "response tokens lost", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        column.justify = "right"
    for limit in report.limits:
        counts = (limit.max_length, limit.num_truncated_rows, limit.num_dropped_rows, limit.response_tokens_lost)
        table.add_row(*(f"{count:,}" for count in counts))
    return table


def show_memory(memory: MemoryPlan, console: Console) -> None:
    """Print the memory of a process by part, and whether it fits on the GPU that was asked about."""
    micro = f"{memory.rows:,} x {memory.length:,} tokens"
    chosen = "on" if memory.activation_checkpointing else "off"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    # A tiny model would be a column of zeros in GiB.
    unit, name_of_unit = (GIB, "GiB") if memory.planned.total >= GIB / 2 else (MIB, "MiB")
    table.add_column(f"memory of a process, {name_of_unit}")
    for name, is_on in (("on", True), ("off", False)):
        mark = " (the recipe)" if is_on == memory.activation_checkpointing else ""
        table.add_column(f"checkpointing {name}{mark}", justify="right")
    for name, label in PARTS:
        table.add_row(label, *(_in(unit, getattr(way, name)) for way in (memory.checkpointed, memory.kept)))
    if memory.context:
        table.add_row("CUDA context", *[_in(unit, memory.context)] * 2)
    table.add_row("in all", *(_in(unit, way.total + memory.context) for way in (memory.checkpointed, memory.kept)))
    console.print(table)
    _say(f"memory: for {micro}, {memory.taken}; fullest at the {memory.planned.moment}", console)
    for line in memory.assumed:
        _say(f"memory: {line}", console)
    if memory.gpu_bytes is not None:
        verdict = "fits" if memory.fits else "does not fit"
        size = f"{memory.gpu_bytes / GIB:g} GiB with checkpointing {chosen}"
        largest = f"the largest micro-batch that does: {memory.largest_rows}" if memory.largest_rows else "no row does"
        _say(f"memory: {verdict} in {size}; {largest}", console)


def render_duration(duration: Duration) -> str:
    """Return the hours of an epoch and of the run on one line."""
    step = f"{duration.step_seconds:.3g} s per step ({duration.source})"
    if duration.hours is None:
        return f"{step}; hours are known once the rows are"
    epoch = ""
    if duration.steps_per_epoch is not None and duration.epoch_hours is not None:
        epoch = f"{duration.steps_per_epoch:,} steps and {_hours(duration.epoch_hours)} per epoch, "
    return f"{step}; {epoch}{_hours(duration.hours)} in all, without evaluation and saving"


def _hours(hours: float) -> str:
    if hours >= 1:
        return f"{hours:.1f} h"
    return f"{hours * 60:.1f} min" if hours * 60 >= 1 else f"{hours * 3600:.3g} s"


def _in(unit: int, number: int) -> str:
    return f"{number / unit:,.2f}" if number else "0"


def _plain(text: str) -> str:
    """Return a name without what a console would take for markup or commands."""
    return "".join(character if character.isprintable() else "?" for character in text).replace("[", "\\[")


def _say(text: str, console: Console, style: str | None = None) -> None:
    console.print(text, style=style, soft_wrap=True, markup=False)
