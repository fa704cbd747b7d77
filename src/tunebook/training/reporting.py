"""What rank 0 shows while it trains, and metrics.jsonl: a progress bar on a terminal, plain lines elsewhere."""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tunebook.system.writing import explain_unwritten, write_whole
from tunebook.training.measuring import PeakMemory
from tunebook.training.trackers import Tracker

# What a line of metrics.jsonl holds, where the event has it.
RECORDED = ("epoch", "loss", "learning_rate", "grad_norm", "tokens_per_second", "eval_loss", "eval_token_accuracy")


class ProgressReport(TrainerCallback):  # type: ignore[misc]
    """Shows each log and evaluation and appends it to metrics.jsonl; only rank 0 has one."""

    def __init__(
        self,
        metrics_path: Path,
        console: Console | None = None,
        earlier: Sequence[dict[str, Any]] = (),
        memory: PeakMemory | None = None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self._metrics_path = metrics_path
        self._console = console or Console()
        self._memory, self._trackers = memory, list(trackers)
        # Of the lives of the run before this one: the clock goes on, and a measurement made again is the same one.
        self._began = time.monotonic() - (earlier[-1]["seconds"] if earlier else 0.0)
        self._measured = {(event["step"], event["eval_loss"]) for event in earlier if "eval_loss" in event}
        self._training_began = time.monotonic()
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._num_steps_at_start = 0
        self._said_unwritten = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock of the time left, and the bar on a terminal."""
        self._training_began = time.monotonic()
        self._num_steps_at_start = state.global_step
        if self._console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(16), TextColumn("{task.description}"))
            self._progress = Progress(*columns, TimeRemainingColumn(), TextColumn("left"), console=self._console)
            self._task = self._progress.add_task("", total=state.max_steps, completed=state.global_step)
            self._progress.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the bar."""
        if self._progress is not None:
            self._progress.update(self._task, completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Record a log or an evaluation and show it; the closing summary of Trainer is neither."""
        logs = logs or {}
        if "loss" not in logs and "eval_loss" not in logs:
            return
        recorded: dict[str, Any] = {name: logs[name] for name in RECORDED if name in logs}
        if "loss" in logs and self._memory is not None:
            recorded["memory_bytes"] = self._memory.read()
        if (state.global_step, logs.get("eval_loss")) not in self._measured:
            self._record({"step": state.global_step, **recorded, "seconds": round(time.monotonic() - self._began, 3)})
        if self._progress is not None and "loss" in logs:
            # Loss and rate alone, so that the line fits a terminal of 80 columns.
            shown: dict[str, float] = {name: logs[name] for name in ("loss", "learning_rate") if name in logs}
            self._progress.update(self._task, description=render_metrics(shown))
        else:
            self._print(self._render_line(state, logs))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the bar as it stands."""
        self.close()

    def close(self) -> None:
        """Give the terminal back and end the trackers, also on the way out of an error."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._tell_trackers(lambda tracker: tracker.close())
        self._trackers = []

    def _render_line(self, state: TrainerState, logs: dict[str, float]) -> str:
        done = state.global_step - self._num_steps_at_start
        parts = ["before training"]
        if state.global_step:
            parts = [f"step {state.global_step}/{state.max_steps}", f"epoch {logs.get('epoch', 0.0):.2f}"]
        parts.append(render_metrics(logs))
        if "loss" in logs and done > 0:
            left = (time.monotonic() - self._training_began) / done * (state.max_steps - state.global_step)
            parts.append(f"{render_seconds(left)} left")
        return "  ".join(parts)

    def _record(self, event: dict[str, Any]) -> None:
        """Write an event down and tell the trackers; one that cannot be written is no reason to end the run."""
        try:
            append_line(self._metrics_path, json.dumps(event))
        except OSError as error:
            if not self._said_unwritten:
                lacking = f"step {event['step']} is missing there, and more may be; training goes on"
                self._print(f"note: {explain_unwritten(error, self._metrics_path)}: {lacking}")
            self._said_unwritten = True
        self._tell_trackers(lambda tracker: tracker.record(event))

    def _tell_trackers(self, tell: Callable[[Tracker], None]) -> None:
        """A tracker that fails is left out from there on: it shows the run, and must not end it."""
        for tracker in list(self._trackers):
            try:
                tell(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                self._print(f"note: {tracker.name} takes no more of this run: {type(error).__name__}: {error}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def append_line(path: Path, line: str) -> None:
    """Add a line to a file; where it cannot be written whole, raise OSError and leave no part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
    except OSError:
        with suppress(OSError):
            os.truncate(path, size)
        raise


def keep_metrics(path: Path, step: int | None) -> list[dict[str, Any]]:
    """Keep the events up to a step of a run that is gone on with, none without a step, and return them.

    Later ones come again, and a line that was being written when the run was killed is none.
    """
    kept = []
    text = path.read_text(encoding="utf-8", errors="replace") if step is not None and path.is_file() else ""
    for line in text.splitlines():
        try:
            event = json.loads(line)
            is_earlier = event["step"] <= (step or 0) and event["seconds"] >= 0
        except (ValueError, KeyError, TypeError):
            continue
        if is_earlier:
            kept.append(event)
    if path.is_file():
        write_whole(path, "".join(json.dumps(event) + "\n" for event in kept))
    return kept


def render_metrics(logs: dict[str, float]) -> str:
    """Return loss, learning rate and gradient norm of a log, or the loss of an evaluation, as one short text."""
    if "eval_loss" in logs:
        return f"held-out loss {logs['eval_loss']:.4f}  right tokens {logs['eval_token_accuracy']:.1%}"
    parts = [f"loss {logs['loss']:.4f}"]
    if "learning_rate" in logs:
        parts.append(f"learning rate {logs['learning_rate']:.2e}")
    if "grad_norm" in logs:
        parts.append(f"gradient norm {logs['grad_norm']:.3g}")
    return "  ".join(parts)


def render_seconds(seconds: float) -> str:
    """Return a time such as `40 s`, `3 min` or `2.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
