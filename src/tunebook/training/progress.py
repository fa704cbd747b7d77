"""What the loop of train_ddp.py shares with Trainer: which weights decay, when it logs and evaluates, and where to.

None of it has to do with DDP: transformers' own state and rules are used, so that both programs do the same.
"""

from typing import Any

from transformers import DefaultFlowCallback, Trainer, TrainerControl, TrainerState

from tunebook.system.whereabouts import begin_step
from tunebook.training.measuring import Pace, Stopwatch
from tunebook.training.reporting import ProgressReport


def decay_groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trained parameters in two groups for AdamW; norms and biases don't decay, as Trainer has it."""
    decaying = set(Trainer.get_decay_parameter_names(None, model))
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    return [
        {"params": [one for name, one in trained.items() if name in decaying], "weight_decay": weight_decay},
        {"params": [one for name, one in trained.items() if name not in decaying], "weight_decay": 0.0},
    ]


class Progress:
    """The state of a loop written by hand; `report` is None on every rank but 0."""

    def __init__(self, arguments: Any, num_steps: int, report: ProgressReport | None, stopwatch: Stopwatch) -> None:
        self.state = TrainerState(max_steps=num_steps)
        self.state.compute_steps(arguments, num_steps)
        self._arguments = arguments
        self._report = report
        self.pace = Pace(stopwatch)

    def begin(self) -> None:
        """Start the bar, and the clock of the time left."""
        begin_step(1)
        self.pace.begin()
        if self._report is not None:
            self._report.on_train_begin(self._arguments, self.state, TrainerControl())

    def step(self, epoch: float) -> TrainerControl:
        """Count an optimizer step that brought training to `epoch`; return what is due after it."""
        self.state.global_step += 1
        begin_step(self.state.global_step + 1)
        self.state.epoch = epoch
        is_last = self.state.global_step >= self.state.max_steps
        due = TrainerControl()
        DefaultFlowCallback().on_step_end(self._arguments, self.state, due)
        if epoch == int(epoch) or is_last:
            DefaultFlowCallback().on_epoch_end(self._arguments, self.state, due)
        due.should_log = due.should_log or is_last
        if self._report is not None:
            self._report.on_step_end(self._arguments, self.state, due)
        return due

    def log(self, **numbers: float) -> None:
        """Keep the numbers on every rank, and show and write them on rank 0."""
        logs = {**numbers, "epoch": self.state.epoch or 0.0}
        if "loss" in logs and (pace := self.pace.read()) is not None:
            logs["tokens_per_second"] = pace
        self.state.log_history.append({**logs, "step": self.state.global_step})
        if self._report is not None:
            self._report.on_log(self._arguments, self.state, TrainerControl(), logs=logs)
