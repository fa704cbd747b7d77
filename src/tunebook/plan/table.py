"""The plan as people read it: each number, and where it came from."""

from collections.abc import Callable, Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tunebook.plan.arithmetic import counted
from tunebook.plan.plan import Plan

UNKNOWN = "unknown"
# Wide enough for a line of the plan where the output is no terminal, so that logs keep one line each.
LOG_WIDTH = 140


def _count(number: int) -> str:
    return f"{number:,}"


def _parameters(number: int) -> str:
    return f"{number:,} ({number / 1e9:.2f} B)" if number >= 1e8 else f"{number:,}"


ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("recipe", "recipe", str),
    ("model", "model", str),
    ("model_revision", "revision", str),
    ("model_parameters", "parameters", _parameters),
    ("method", "method", str),
    ("trainable_parameters", "trainable parameters", _parameters),
    ("compute_dtype", "compute type", str),
    ("world_size", "processes", _count),
    ("device_type", "device", str),
    ("backend", "backend", str),
    ("global_batch_size", "global batch (rows per step)", _count),
    ("per_device_train_batch_size", "micro-batch (rows per process)", _count),
    ("gradient_accumulation_steps", "micro-steps per step", _count),
    ("learning_rate", "learning rate", "{:g}".format),
    ("lr_scheduler_type", "schedule", str),
    ("warmup_steps", "warm-up steps", lambda steps: f"{steps:g}" if steps >= 1 or not steps else f"{steps:g} of all"),
    ("optim", "optimizer", str),
    ("num_train_epochs", "epochs", "{:g}".format),
    ("max_steps", "step limit", _count),
    ("num_train_rows", "training rows", _count),
    ("num_eval_rows", "held-out rows", _count),
    ("steps_per_epoch", "steps per epoch", _count),
    ("num_optimizer_steps", "optimizer steps", _count),
    ("max_length", "longest row (tokens)", _count),
    ("activation_checkpointing", "activation checkpointing", lambda on: "on" if on else "off"),
    ("seed", "seed", str),
    ("run_dir", "run folder", str),
)
# Left out where they say nothing: no revision was named, one process has no backend, epochs or steps decide.
LEFT_OUT_WHEN_NONE = {"model_revision", "backend", "num_train_epochs", "max_steps"}


def build_console(stderr: bool = False) -> Console:
    """Return a console that wraps nothing where the output is no terminal."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(stderr=stderr, highlight=False, width=LOG_WIDTH)
    return console


def render_plan(plan: Plan) -> Table:
    """Return the plan as a table of three columns: what, the number, where it came from."""
    whole = f"{counted(plan.world_size, 'process')} x {counted(plan.per_device_train_batch_size, 'row')} x "
    whole += f"{counted(plan.gradient_accumulation_steps, 'micro-step')} = {plan.global_batch_size} rows per step"
    table = Table(title=f"plan: {whole}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("what", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", style="dim", overflow="fold")
    for name, label, shown in ROWS:
        value = getattr(plan, name)
        if value is None and name in LEFT_OUT_WHEN_NONE:
            continue
        table.add_row(label, UNKNOWN if value is None else shown(value), plan.origins.get(name, ""))
    return table


def print_notes(notes: Iterable[str], console: Console) -> None:
    """Print what the user should know, one line each however long."""
    for note in notes:
        console.print(f"note: {note}", style="yellow", soft_wrap=True, markup=False)
