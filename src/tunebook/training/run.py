"""A run from the loaded model to the written adapter, one line per step."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from tunebook.adapter import adapter_tensors, tensor_sha256, write_adapter
from tunebook.data.prepare import PreparedData, write_quarantine
from tunebook.model import build_model, check_positions
from tunebook.plan import Plan
from tunebook.process_group import refuse_together
from tunebook.recipe.schema import Recipe
from tunebook.training.answers import greedy_answers, num_exact_matches
from tunebook.training.arguments import build_training_arguments, check_schedule
from tunebook.training.batches import BatchLayout, GlobalBatchSampler, build_train_batches
from tunebook.training.collectives import largest_over_processes, sum_over_processes, wait_for_all
from tunebook.training.measuring import PeakMemory
from tunebook.training.reporting import ProgressReport
from tunebook.training.summary import RunSummary, failed_summary, start_summary, write_summary
from tunebook.training.trainer import RecipeTrainer, diverged
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
    began: float


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
    began = time.monotonic()
    with refuse_together():
        arguments = build_training_arguments(recipe, plan, world)
        layout = BatchLayout(plan.global_batch_size, world.num_processes, plan.gradient_accumulation_steps, world.rank)
        lengths = data.train["length"]
        batches = build_train_batches(lengths, layout, recipe.data_seed, arguments.dataloader_drop_last)
        check_schedule(arguments, plan)
        model = build_model(recipe, plan, world, tokenizer)
        check_positions(recipe, model, data.longest_row)
    return ReadyRun(recipe, plan, world, tokenizer, data, arguments, batches, model, began)


def train(run: ReadyRun) -> RunResult:
    """Measure, train, measure again and write the adapter; run_summary.json tells the state of it from the start.

    Raises what training raised, after the summary on disk says `failed` (or `interrupted`) and why.
    """
    summary = start_summary(run.recipe, run.plan, run.world, run.data, run.model)
    report = ProgressReport(Path(run.plan.run_dir) / "metrics.jsonl") if run.world.is_main else None
    memory = PeakMemory(run.world.device)
    _write_on_main(run, summary)
    if run.world.is_main and run.data.num_bad_rows:
        write_quarantine(run.data, Path(run.plan.run_dir) / "quarantine.jsonl")
    try:
        trainer = build_trainer(run, report)
        before = measure_held_out(trainer, run)
        summary = replace(summary, eval_loss_before=before.loss, exact_match_before=_share(before, run))
        trainer.train()
        after = measure_held_out(trainer, run)
        _check_finite(trainer.model)
        notes = _write_adapter_on_main(run, trainer.model)
        summary = _complete(summary, run, trainer, memory, after)
        _write_on_main(run, summary)
    except BaseException as error:
        _write_on_main(run, replace(failed_summary(summary, error), wall_seconds=time.monotonic() - run.began))
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
    answers = greedy_answers(trainer.model, run.tokenizer, run.data, run.world, run.plan.compute_dtype)
    return HeldOut(trainer.held_out_loss(), tuple(answers), num_exact_matches(run.data.examples, answers))


def _check_finite(model: Any) -> None:
    """Raise TrainingFailed, on every process alike, rather than hand out weights that are no numbers."""
    for name, weight in model.named_parameters():
        if weight.requires_grad and not torch.isfinite(weight).all():
            raise diverged(f"after the last step {name} holds values that are no finite numbers")


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
        wall_seconds=time.monotonic() - run.began,
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
