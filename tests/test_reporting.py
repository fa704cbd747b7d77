"""What a user sees while training, and what metrics.jsonl holds."""

import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from tunebook.training.reporting import ProgressReport, render_seconds

pytestmark = pytest.mark.slow


def play(tmp_path, terminal: bool) -> str:
    """Let a report see a run of 20 steps and return what it wrote to the console."""
    shown = io.StringIO()
    report = ProgressReport(tmp_path / "run" / "metrics.jsonl", Console(file=shown, force_terminal=terminal, width=120))
    state = SimpleNamespace(global_step=0, max_steps=0)
    report.on_log(None, state, None, {"eval_loss": 3.0, "eval_token_accuracy": 0.25, "eval_runtime": 1.0, "epoch": 0})
    state.max_steps = 20
    report.on_train_begin(None, state, None)
    for step in range(1, 21):
        state.global_step = step
        report.on_step_end(None, state, None)
        if step % 10 == 0:
            logs = {"loss": 2.0 / step, "learning_rate": 1e-4, "grad_norm": 0.5, "epoch": step / 10}
            report.on_log(None, state, None, logs)
    report.on_log(None, state, None, {"eval_loss": 1.5, "eval_token_accuracy": 0.5, "epoch": 2.0})
    report.on_log(None, state, None, {"train_runtime": 3.0, "train_loss": 0.1, "epoch": 2.0})
    report.on_train_end(None, state, None)
    report.close()
    return shown.getvalue()


def test_plain_lines_where_there_is_no_terminal(tmp_path):
    lines = play(tmp_path, terminal=False).splitlines()
    assert lines[0] == "before training  held-out loss 3.0000  right tokens 25.0%"
    assert lines[1].startswith("step 10/20  epoch 1.00  loss 0.2000  learning rate 1.00e-04  gradient norm 0.5  ")
    assert lines[1].endswith(" left")
    assert lines[3] == "step 20/20  epoch 2.00  held-out loss 1.5000  right tokens 50.0%"
    assert len(lines) == 4
    assert not set("\r\x1b") & set("".join(lines))


def test_a_bar_with_loss_and_time_left_on_a_terminal(tmp_path):
    shown = play(tmp_path, terminal=True)
    assert "20/20" in shown and "loss 0.1000" in shown and "left" in shown and "\x1b[" in shown
    assert "held-out loss 1.5000" in shown


def test_metrics_hold_each_log_and_evaluation_once(tmp_path):
    play(tmp_path, terminal=False)
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(event["step"], event.get("loss"), event.get("eval_loss")) for event in events] == [
        (0, None, 3.0),
        (10, 0.2, None),
        (20, 0.1, None),
        (20, None, 1.5),
    ]
    assert events[1].keys() == {"step", "epoch", "loss", "learning_rate", "grad_norm", "seconds"}
    seconds = [event["seconds"] for event in events]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (89, "89 s"), (300, "5 min"), (9000, "2.5 h")])
def test_times_are_short(seconds, text):
    assert render_seconds(seconds) == text
