"""A run from the loaded model to the written adapter, one line per step."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from transformers import TrainerCallback, TrainerState, TrainingArguments

from tunebook.adapter import adapter_tensors, tensor_sha256, write_adapter
from tunebook.data.prepare import PreparedData, write_quarantine
from tunebook.model import build_model, check_positions
from tunebook.plan import Plan
from tunebook.process_group import refuse_together
from tunebook.recipe.schema import Recipe
from tunebook.training.agreement import check_replicas, check_same_start
from tunebook.training.answers import greedy_answers, num_exact_matches
from tunebook.training.arguments import build_training_arguments, check_schedule
from tunebook.training.batches import BatchLayout, GlobalBatchSampler, build_train_batches
from tunebook.training.collectives import largest_over_processes, sum_over_processes, wait_for_all
from tunebook.training.loss import check_weights_finite
from tunebook.training.measuring import PeakMemory, Stopwatch, TokenCounts
from tunebook.training.reporting import ProgressReport
from tunebook.training.summary import RunSummary, failed_summary, start_summary, write_summary
from tunebook.training.trainer import RecipeTrainer, ReplicaCheck
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


class Training(Protocol):
    """What has trained, or will: the Trainer of finetune.py, or the loop of train_ddp.py."""

    model: Any
    state: TrainerState
    tokens: TokenCounts
    stopwatch: Stopwatch

    def held_out_loss(self) -> float | None:
        """Return the held-out loss of the weights as they stand, or None where no rows are held out."""


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
    check_same_start(start_facts(recipe, plan, data))
    with refuse_together():
        arguments = build_training_arguments(recipe, plan, world)
        layout = BatchLayout(plan.global_batch_size, world.num_processes, plan.gradient_accumulation_steps, world.rank)
        lengths = data.train["length"]
        batches = build_train_batches(lengths, layout, recipe.data_seed, arguments.dataloader_drop_last)
        check_schedule(arguments, plan)
        model = build_model(recipe, plan, world, tokenizer)
        check_positions(recipe, model, data.longest_row)
    return ReadyRun(recipe, plan, world, tokenizer, data, arguments, batches, model, began)


def start_facts(recipe: Recipe, plan: Plan, data: PreparedData) -> dict[str, Any]:
    """Return what all ranks must have in common before step 1, by the names that a user knows."""
    return {
        "training rows": data.num_train_rows,
        "held-out rows": data.num_eval_rows,
        "data fingerprint": data.data_fingerprint[:12],
        "optimizer steps": plan.num_optimizer_steps,
        "rows per step": plan.global_batch_size,
        "micro-steps per step": plan.gradient_accumulation_steps,
        "compute type": plan.compute_dtype,
        "torch": version("torch"),
        "transformers": version("transformers"),
        **_by_key(recipe.resolved),
    }


def _by_key(values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return nested values by their dotted keys."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _by_key(value, f"{section}{name}.") if isinstance(value, Mapping) else {f"{section}{name}": value}
    return found


def train(run: ReadyRun) -> RunResult:
    """Measure, train, measure again and write the adapter; run_summary.json tells the state of it from the start.

    Raises what training raised, after the summary on disk says `failed` (or `interrupted`) and why.
    """
    summary, report, memory = begin_folder(run), build_report(run), PeakMemory(run.world.device)
    try:
        trainer = build_trainer(run, report)
        before = measure_held_out(trainer, run)
        summary = replace(summary, eval_loss_before=before.loss, exact_match_before=exact_share(before, run))
        trainer.train()
        after = measure_held_out(trainer, run)
        notes = write_adapter_on_main(run, trainer.model)
        summary = complete_summary(summary, run, trainer, memory, after)
        write_on_main(run, summary)
    except BaseException as error:
        write_failure_on_main(run, summary, error)
        raise
    finally:
        memory.stop()
        if report is not None:
            report.close()
    return RunResult(run, summary, before, after, notes)


def begin_folder(run: ReadyRun) -> RunSummary:
    """Write what is known before step 1, on rank 0: the running summary, and the rows that cannot be used."""
    summary = start_summary(run.recipe, run.plan, run.world, run.data, run.model)
    write_on_main(run, summary)
    if run.world.is_main and run.data.num_bad_rows:
        write_quarantine(run.data, Path(run.plan.run_dir) / "quarantine.jsonl")
    return summary


def build_report(run: ReadyRun) -> ProgressReport | None:
    """Return what shows the run and writes metrics.jsonl on rank 0, and None on the other ranks."""
    return ProgressReport(Path(run.plan.run_dir) / "metrics.jsonl") if run.world.is_main else None


def build_trainer(run: ReadyRun, report: ProgressReport | None) -> RecipeTrainer:
    """Return the trainer of a run; `report` is None on every rank but 0."""
    callbacks: list[TrainerCallback] = [ReplicaCheck(run.recipe.batch.check_replicas)]
    if report is not None:
        callbacks.append(report)
    return RecipeTrainer(run.model, run.arguments, run.data, run.batches, callbacks)


def measure_held_out(trainer: Training, run: ReadyRun) -> HeldOut:
    """Return the held-out loss and the answers to held-out prompts, as the weights stand now."""
    answers = greedy_answers(trainer.model, run.tokenizer, run.data, run.world, run.plan.compute_dtype)
    return HeldOut(trainer.held_out_loss(), tuple(answers), num_exact_matches(run.data.examples, answers))


def complete_summary(
    summary: RunSummary, run: ReadyRun, trainer: Training, memory: PeakMemory, after: HeldOut
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
        exact_match_after=exact_share(after, run),
        num_exact_match_rows=len(run.data.examples),
        tokens_per_second=trained / seconds if seconds else None,
        training_seconds=seconds,
        peak_memory_bytes=int(peak) or None,
        wall_seconds=time.monotonic() - run.began,
        adapter_dir=run.plan.adapter_dir,
        adapter_sha256=tensor_sha256(adapter_tensors(trainer.model)),
    )


def exact_share(held_out: HeldOut, run: ReadyRun) -> float | None:
    """Return which part of the held-out prompts was answered word for word; None without prompts."""
    return held_out.num_exact_matches / len(run.data.examples) if run.data.examples else None


def write_adapter_on_main(run: ReadyRun, model: Any) -> tuple[str, ...]:
    """Write the adapter on rank 0, with the others waiting until it is whole; return rank 0's notes for the user.

    What rank 0 writes must be what all ranks trained: a step whose gradient was not reduced on all of them, which DDP
    would only notice in the next one, ends here.
    """
    check_replicas(model, run.plan.num_optimizer_steps or 0)
    check_weights_finite(model)
    notes: tuple[str, ...] = ()
    if run.world.is_main:
        folder = Path(run.plan.adapter_dir)
        notes = write_adapter(model, run.tokenizer, run.recipe, folder, run.data.stop_token_id)
    wait_for_all()
    return notes


def write_failure_on_main(run: ReadyRun, summary: RunSummary, error: BaseException) -> None:
    """Write on rank 0 that the run ended with `error`."""
    write_on_main(run, replace(failed_summary(summary, error), wall_seconds=time.monotonic() - run.began))


def write_on_main(run: ReadyRun, summary: RunSummary) -> None:
    """Write run_summary.json on rank 0."""
    if run.world.is_main:
        write_summary(summary, run.plan.run_dir)
