"""The figures of a model before and after training, and how they are shown side by side."""

from dataclasses import dataclass

from tunebook.plan.arithmetic import counted
from tunebook.plan.table import build_console

SHOWN = {"loss": "{:.4f}", "perplexity": "{:.4f}", "exact_match": "{:.1%}", "rouge_l": "{:.4f}"}
LABELS = {"exact_match": "exact match", "rouge_l": "ROUGE-L"}


@dataclass(frozen=True)
class Figures:
    """What one model does on the rows: nats a label and their exp; None for what is no number, or needs answers."""

    loss: float | None
    perplexity: float | None
    exact_match: float | None
    rouge_l: float | None


@dataclass(frozen=True)
class Measured:
    """The rows, and the figures of both models on them. `num_labels` are the tokens that the loss is over."""

    run: str
    data: str
    data_fingerprint: str
    num_rows: int
    num_labels: int
    num_answered: int
    num_truncated_rows: int
    num_dropped_rows: int
    num_bad_rows: int
    before: Figures | None
    after: Figures


def show_figures(measured: Measured) -> None:
    """Print the figures of both models side by side, and what they are of."""
    from rich import box
    from rich.table import Table

    models = [one for one in (measured.before, measured.after) if one is not None]
    table = Table("", *("before", "after")[-len(models) :], box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, shown in SHOWN.items():
        values = [getattr(one, name) for one in models]
        if any(value is not None for value in values):
            table.add_row(LABELS.get(name, name), *("-" if value is None else shown.format(value) for value in values))
    console = build_console()
    console.print(_describe(measured), markup=False, soft_wrap=True)
    console.print(table)


def _describe(measured: Measured) -> str:
    parts = [counted(measured.num_rows, "row"), counted(measured.num_labels, "label")]
    parts.append(f"{measured.num_answered:,} answered")
    for number, what in (
        (measured.num_truncated_rows, "cut at data.max_length, and not answered"),
        (measured.num_dropped_rows, "left out for their length"),
        (measured.num_bad_rows, "bad, left out"),
    ):
        parts += [f"{number:,} {what}"] if number else []
    return f"{measured.run} on {measured.data}: {', '.join(parts)}"
