"""A run from the loaded model to the written adapter, one line per step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from tunebook.adapter import adapter_tensors, tensor_sha256, write_adapter
from tunebook.checkpoints import Checkpoint
from tunebook.data.prepare import PreparedData, write_quarantine
from tunebook.errors import Interrupted
from tunebook.model import build_model
from tunebook.plan import Plan
from tunebook.process_group import refuse_together
from tunebook.recipe.schema import Recipe
from tunebook.signals import deferred_signals, ignore_signals
from tunebook.training.answers import greedy_answers, num_exact_matches
from tunebook.training.arguments import build_training_arguments
from tunebook.training.batches import BatchLayout, GlobalBatchSampler, build_train_batches
from tunebook.training.collectives import largest_over_processes, sum_over_processes, wait_for_all
from tunebook.training.failures import explain_failure
from tunebook.training.measuring import PeakMemory
from tunebook.training.reporting import ProgressReport, keep_metrics
from tunebook.training.stopping import StopAgreed
from tunebook.training.summary import RunSummary, failed_summary, start_summary, write_summary
from tunebook.training.trainer import RecipeTrainer
from tunebook.world import World


@dataclass(frozen=True)
class ReadyRun:
    """Everything a run needs, built and accepted; nothing is written yet."""

    recipe: Recipe
    plan: Plan
    world: World
    tokenizer: Any
    data: PreparedData
    arguments: TrainingArguments
    batches: GlobalBatchSampler
    model: Any


@dataclass(frozen=True)
class HeldOut:
    """What the model does on held-out rows at one moment; the loss is None where none are held out."""

    loss: float | None
    answers: tuple[str, ...]
    num_exact_matches: int


@dataclass(frozen=True)
class RunResult:
    """What came out of a run: its summary, held-out rows before and after, and notes for the user."""

    run: ReadyRun
    summary: RunSummary
    before: HeldOut
    after: HeldOut
    notes: tuple[str, ...]


def build_run(recipe: Recipe, plan: Plan, world: World, tokenizer: Any, data: PreparedData) -> ReadyRun:
    """Build arguments, batches and model; every rank raises the same Refused where any of them cannot be had."""
    with refuse_together():
        arguments = build_training_arguments(recipe, plan, world)
        layout = BatchLayout(plan.global_batch_size, world.num_processes, plan.gradient_accumulation_steps, world.rank)
        lengths = data.train["length"]
        batches = build_train_batches(lengths, layout, recipe.data_seed, arguments.dataloader_drop_last)
        model = build_model(recipe, plan, world, tokenizer)
    return ReadyRun(recipe, plan, world, tokenizer, data, arguments, batches, model)


def train(run: ReadyRun, checkpoint: Checkpoint | None = None) -> RunResult:
    """Measure, train, measure again and write the adapter; run_summary.json tells the state of it from the start.

    With a checkpoint the run goes on from there. Raises what training raised, after the summary on disk says `failed`
    and why; and Interrupted after a signal, once a checkpoint is saved.
    """
    summary = start_summary(run.recipe, run.plan, run.world, run.data, run.model)
    memory = PeakMemory(run.world.device)
    _write_on_main(run, summary)
    report = _build_report(run, checkpoint)
    trainer = build_trainer(run, report)
    try:
        with deferred_signals(), trainer.vote.heard(), _stopping(trainer), explain_failure(trainer, run.plan):
            before = _take_up_or_measure(trainer, run, checkpoint)
            summary = replace(summary, eval_loss_before=before.loss, exact_match_before=_share(before, run))
            trainer.train_on(checkpoint)
            after = measure_held_out(trainer, run)
            notes = _write_adapter_on_main(run, trainer.model)
            summary = _complete(summary, run, trainer, memory, after)
            _write_on_main(run, summary)
    except BaseException as error:
        _write_on_main(run, _broken_off(summary, trainer, error))
        raise
    finally:
        memory.stop()
        if report is not None:
            report.close()
    return RunResult(run, summary, before, after, notes)


def build_trainer(run: ReadyRun, report: ProgressReport | None) -> RecipeTrainer:
    """Return the trainer of a run; `report` is None on every rank but 0."""
    callbacks = [] if report is None else [report]
    return RecipeTrainer(run.model, run.arguments, run.data, run.batches, callbacks)


def measure_held_out(trainer: RecipeTrainer, run: ReadyRun) -> HeldOut:
    """Return the held-out loss and the answers to held-out prompts, as the weights stand now."""
    answers = answer_held_out(trainer, run)
    return HeldOut(trainer.held_out_loss(), tuple(answers), num_exact_matches(run.data.examples, answers))


def answer_held_out(trainer: RecipeTrainer, run: ReadyRun) -> list[str]:
    """Return the model's answers to the held-out prompts, on every process."""
    return greedy_answers(trainer.model, run.tokenizer, run.data, run.world, run.plan.compute_dtype, trainer.vote)


def _take_up_or_measure(trainer: RecipeTrainer, run: ReadyRun, checkpoint: Checkpoint | None) -> HeldOut:
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


def _build_report(run: ReadyRun, checkpoint: Checkpoint | None) -> ProgressReport | None:
    if not run.world.is_main:
        return None
    if run.data.num_bad_rows:
        write_quarantine(run.data, Path(run.plan.run_dir) / "quarantine.jsonl")
    metrics = Path(run.plan.run_dir) / "metrics.jsonl"
    return ProgressReport(metrics, earlier=keep_metrics(metrics, None if checkpoint is None else checkpoint.step))


@contextmanager
def _stopping(trainer: RecipeTrainer) -> Iterator[None]:
    """Save where all processes agreed to stop, and raise Interrupted on all of them."""
    try:
        yield
    except StopAgreed as agreed:
        step = trainer.save_where_it_stands()
        # The first rank to leave makes the launcher end the others, whose exit code should be their own.
        ignore_signals()
        wait_for_all()
        done = f"at step {step} of {trainer.state.max_steps}, and checkpoint-{step} is saved"
        where = done if step else "before the first step was done"
        raise Interrupted(f"stopped by {agreed} {where}: run the same command again to go on") from agreed


def _broken_off(summary: RunSummary, trainer: RecipeTrainer, error: BaseException) -> RunSummary:
    step = trainer.saved_step if isinstance(error, Interrupted) else trainer.state.global_step
    return replace(failed_summary(summary, error), num_optimizer_steps=step, wall_seconds=trainer.wall_seconds)


def _complete(
    summary: RunSummary, run: ReadyRun, trainer: RecipeTrainer, memory: PeakMemory, after: HeldOut
) -> RunSummary:
    """Return the summary of the finished run; every process takes part in its sums."""
    tokens, device = trainer.tokens, run.world.device
    processed, padded, trained = sum_over_processes([tokens.processed, tokens.padded, tokens.trained], device)
    [peak] = largest_over_processes([memory.stop() or 0], device)
    losses = [logged["loss"] for logged in trainer.state.log_history if "loss" in logged]
    seconds = trainer.stopwatch.seconds
    return replace(
        summary,
        status="completed",
        exit_code=0,
        num_optimizer_steps=trainer.state.global_step,
        processed_tokens=int(processed),
        padded_tokens=int(padded),
        trained_tokens=int(trained),
        first_loss=losses[0] if losses else None,
        final_loss=losses[-1] if losses else None,
        eval_loss=after.loss,
        exact_match_after=_share(after, run),
        num_exact_match_rows=len(run.data.examples),
        tokens_per_second=trained / seconds if seconds else None,
        training_seconds=seconds,
        peak_memory_bytes=int(peak) or None,
        wall_seconds=trainer.wall_seconds,
        adapter_dir=run.plan.adapter_dir,
        adapter_sha256=tensor_sha256(adapter_tensors(trainer.model)),
    )


def _share(held_out: HeldOut, run: ReadyRun) -> float | None:
    return held_out.num_exact_matches / len(run.data.examples) if run.data.examples else None


def _write_adapter_on_main(run: ReadyRun, model: Any) -> tuple[str, ...]:
    notes: tuple[str, ...] = ()
    if run.world.is_main:
        folder = Path(run.plan.adapter_dir)
        notes = write_adapter(model, run.tokenizer, run.recipe, folder, run.data.stop_token_id)
    wait_for_all()
    return notes


def _write_on_main(run: ReadyRun, summary: RunSummary) -> None:
    if run.world.is_main:
        write_summary(summary, run.plan.run_dir)
