"""How training ends before its end: stopped by a signal, or for a failure that is understood and said in one line."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tunebook.errors import (
    PEER_ENDED,
    SECONDS_FOR_FAILED_RANK,
    Interrupted,
    TrainingFailed,
    is_out_of_memory,
    is_peer_gone,
)
from tunebook.plan.plan import Plan
from tunebook.runs.checkpoints import list_checkpoints
from tunebook.system.signals import deferred_signals, ignore_signals, wait_for_signal
from tunebook.training.collectives import wait_for_all
from tunebook.training.outcome import Training
from tunebook.training.stopping import StopAgreed

# What they say when nothing came within the time-out; where it is known who is behind, the watchdog has said so before.
TIMED_OUT = ("timed out waiting", "operation timed out", "timeout waiting")
AGAIN = "run the same command again"


@contextmanager
def saying_why(trainer: Training, plan: Plan, save: Callable[[], int] | None = None) -> Iterator[None]:
    """Let a signal stop training where all processes agree to, and turn failures that are understood into words.

    Raises Interrupted on all processes after a signal to any of them, and TrainingFailed. `save` saves a checkpoint
    after the last whole step, and returns that step, or 0 where there was none.
    """
    with deferred_signals(), trainer.vote.heard(), stopping(trainer, plan, save), explaining(trainer, plan):
        yield


@contextmanager
def stopping(trainer: Training, plan: Plan, save: Callable[[], int] | None) -> Iterator[None]:
    """Save where all processes agreed to stop, and raise Interrupted on all of them."""
    try:
        yield
    except StopAgreed as agreed:
        step = save() if save is not None else 0
        # The first rank to leave makes the launcher end the others, whose exit code should be their own.
        ignore_signals()
        wait_for_all()
        # By the plan: before train() Trainer's own state has no number of steps.
        done, total = trainer.state.global_step, plan.num_optimizer_steps
        if step:
            what = f"at step {step} of {total}, and checkpoint-{step} is saved: {AGAIN} to go on"
        elif done:
            what = f"at step {done} of {total}, and nothing is saved: {AGAIN} to start over"
        else:
            what = f"before the first step was done: {AGAIN} to go on"
        raise Interrupted(f"stopped by {agreed} {what}", step) from agreed


@contextmanager
def explaining(trainer: Training, plan: Plan) -> Iterator[None]:
    """Turn running out of memory, and the loss of another process, into TrainingFailed."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        said = str(error).lower()
        if is_out_of_memory(error):
            raise TrainingFailed(_render_out_of_memory(trainer, plan), befell="this rank") from error
        if is_peer_gone(error):
            wait_for_signal(SECONDS_FOR_FAILED_RANK)
            raise TrainingFailed(f"{PEER_ENDED}. {_last_checkpoint(plan)}", befell="another rank") from error
        if any(words in said for words in TIMED_OUT):
            raise TrainingFailed(_render_timed_out(trainer, plan), befell="this rank") from error
        raise


def _render_timed_out(trainer: Training, plan: Plan) -> str:
    return (
        f"nothing came from the other ranks in step {trainer.state.global_step + 1} within training.ddp_timeout. If "
        f"none of them hangs, the network between them does; {AGAIN} once it is mended. {_last_checkpoint(plan)}"
    )


def _render_out_of_memory(trainer: Training, plan: Plan) -> str:
    """Return where memory ran out, and settings that need less of it at the same global batch."""
    rows, tokens = f"{plan.per_device_train_batch_size} rows of up to {plan.max_length} tokens", plan.max_length
    if trainer.last_micro_batch is not None:
        rows, tokens = _sizes_of(trainer.last_micro_batch)
    micro, accumulation = plan.per_device_train_batch_size, plan.gradient_accumulation_steps
    advice = []
    if micro > 1:
        smaller = max(size for size in range(1, micro) if plan.global_batch_size % (size * plan.world_size) == 0)
        steps = plan.global_batch_size // (smaller * plan.world_size)
        advice.append(
            f"training.per_device_train_batch_size: {smaller} (with gradient_accumulation_steps {steps} the global "
            f"batch stays {plan.global_batch_size})"
        )
    if not plan.activation_checkpointing:
        advice.append("training.activation_checkpointing: true")
    if plan.max_length > 2:
        advice.append(f"data.max_length below {tokens} (changes the rows, so it needs --fresh)")
    return (
        f"out of memory at step {trainer.state.global_step + 1}: {rows}, "
        f"per_device_train_batch_size {micro}, gradient_accumulation_steps {accumulation}, {plan.compute_dtype}, "
        f"{plan.method}. Less memory: {'; or '.join(advice)}. {_last_checkpoint(plan)}"
    )


def _sizes_of(micro_batch: Mapping[str, Any]) -> tuple[str, int]:
    """Return how large a micro-batch is in words, and the tokens of its longest row."""
    num_tokens = micro_batch["input_ids"].shape[1]
    if "position_ids" not in micro_batch:
        return f"{micro_batch['num_rows']} rows of up to {num_tokens} tokens", num_tokens
    longest = int(micro_batch["position_ids"].max()) + 1
    return f"{micro_batch['num_rows']} rows of up to {longest} tokens, joined to {num_tokens}", longest


def _last_checkpoint(plan: Plan) -> str:
    folders = list_checkpoints(Path(plan.run_dir) / "checkpoints")
    if not folders:
        return "No checkpoint was saved"
    return f"The last checkpoint is {folders[-1]}; the same command goes on from it"
