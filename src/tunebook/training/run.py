"""A run from the loaded model to the written adapter, one line per step."""

from dataclasses import asdict

from transformers import TrainerCallback

from tunebook.runs.checkpoints import Checkpoint
from tunebook.training.answers import num_exact_matches
from tunebook.training.failures import saying_why
from tunebook.training.outcome import (
    HeldOut,
    Record,
    RunResult,
    answer_held_out,
    measure_held_out,
    write_adapter_on_main,
)
from tunebook.training.ready import ReadyRun
from tunebook.training.reporting import ProgressReport
from tunebook.training.trainer import RecipeTrainer, ReplicaCheck


def train(run: ReadyRun, checkpoint: Checkpoint | None = None) -> RunResult:
    """Measure, train, measure again and write the adapter; run_summary.json tells the state of it from the start.

    With a checkpoint the run goes on from there. Raises what training raised, after the summary on disk says `failed`
    and why; and Interrupted after a signal, once a checkpoint is saved.
    """
    record = Record(run, None if checkpoint is None else checkpoint.step)
    trainer = build_trainer(run, record.report)
    with record.kept(trainer), saying_why(trainer, run.plan, save=trainer.save_where_it_stands):
        before = take_up_or_measure(trainer, run, checkpoint)
        record.note_before(before)
        trainer.train_on(checkpoint)
        after = measure_held_out(trainer, run)
        notes = write_adapter_on_main(run, trainer.model)
        notes += record.complete(trainer, after)
    return RunResult(run, record.summary, before, after, notes)


def build_trainer(run: ReadyRun, report: ProgressReport | None) -> RecipeTrainer:
    """Return the trainer of a run; `report` is None on every rank but 0."""
    callbacks: list[TrainerCallback] = [ReplicaCheck(run.recipe.batch.check_replicas)]
    if report is not None:
        callbacks.append(report)
    return RecipeTrainer(run, callbacks)


def take_up_or_measure(trainer: RecipeTrainer, run: ReadyRun, checkpoint: Checkpoint | None) -> HeldOut:
    """Return what the model could do before step 1: measured now, or kept in the checkpoint that is gone on from."""
    if checkpoint is not None:
        before = trainer.go_on_from(checkpoint).before
        answers = before["answers"]
        if len(answers) != len(run.data.examples):  # data.answer_rows changed; the weights are still those of step 0
            answers = answer_held_out(trainer, run)
        return HeldOut(before["loss"], tuple(answers), num_exact_matches(run.data.examples, answers))
    measured = measure_held_out(trainer, run)
    trainer.before = asdict(measured)
    return measured
