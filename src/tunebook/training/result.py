"""The short table a run ends with: what the model could do before, and after."""

from io import StringIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tunebook.training.outcome import RunResult

NUM_SAMPLES = 3
LONGEST_SHOWN = 60


def render_result_table(result: RunResult, width: int = 100) -> str:
    """Return the end of a run as plain text of at most `width` columns: held-out loss, exact matches, some answers."""
    numbers = Table("held out", "before", "after", box=box.SIMPLE_HEAD)
    if result.before.loss is not None and result.after.loss is not None:
        numbers.add_row("loss", f"{result.before.loss:.4f}", f"{result.after.loss:.4f}")
    if total := len(result.run.data.examples):
        before, after = (_share(one.num_exact_matches, total) for one in (result.before, result.after))
        numbers.add_row("exact matches", before, after)
    answers = Table("held-out prompt", "right answer", "before", "after", box=box.SIMPLE_HEAD, show_lines=False)
    rows = zip(result.run.data.examples, result.before.answers, result.after.answers, strict=True)
    for example, before_text, after_text in list(rows)[:NUM_SAMPLES]:
        texts = (example.prompt, example.answer, before_text, after_text)
        answers.add_row(*(escape(shorten(text)) for text in texts))
    console = Console(file=StringIO(), width=width, force_terminal=False)
    for table in (numbers, answers):
        if table.row_count:
            console.print(table)
    assert isinstance(console.file, StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines() if line.strip())


def _share(part: int, total: int) -> str:
    return f"{part}/{total} ({part / total:.1%})"


def shorten(text: str) -> str:
    """Return a text on one line, its middle left out where it is long, unprintable characters made visible."""
    line = " ".join(text.split())
    line = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line)
    if len(line) <= LONGEST_SHOWN:
        return line
    return f"{line[: LONGEST_SHOWN // 2 - 2]} ... {line[-LONGEST_SHOWN // 2 + 3 :]}"
