"""Failures of training that are understood, said in one line with what to change."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tunebook.checkpoints import list_checkpoints
from tunebook.errors import TrainingFailed
from tunebook.plan import Plan
from tunebook.training.trainer import RecipeTrainer

# What gloo and nccl say when another process of the group has ended; neither has a type of its own for it.
PEER_IS_GONE = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited")
# torch's agent looks every 0.1 s: so it meets the one that died alone, and names it as the root cause.
LAUNCHER_NOTICES_SECONDS = 0.5
# torch has an error of its own for a GPU, and none for a CPU.
NO_MEMORY = ("can't allocate memory", "cannot allocate memory", "not enough memory")


@contextmanager
def explain_failure(trainer: RecipeTrainer, plan: Plan) -> Iterator[None]:
    """Turn running out of memory, and the loss of another process, into TrainingFailed."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        said = str(error).lower()
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in said for words in NO_MEMORY):
            raise TrainingFailed(render_out_of_memory(trainer, plan), befell="this rank") from error
        if any(words in said for words in PEER_IS_GONE):
            last = _last_checkpoint(trainer)
            message = f"another process of the group ended; the launcher names the one that did so first. {last}"
            time.sleep(LAUNCHER_NOTICES_SECONDS)
            raise TrainingFailed(message, befell="another rank") from error
        raise


def render_out_of_memory(trainer: RecipeTrainer, plan: Plan) -> str:
    """Return where memory ran out, and settings that need less of it at the same global batch."""
    rows, tokens = trainer.last_shape or (plan.per_device_train_batch_size, plan.max_length)
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
        f"out of memory at step {trainer.state.global_step + 1}: {rows} rows of up to {tokens} tokens, "
        f"per_device_train_batch_size {micro}, gradient_accumulation_steps {accumulation}, {plan.compute_dtype}, "
        f"{plan.method}. Less memory: {'; or '.join(advice)}. {_last_checkpoint(trainer)}"
    )


def _last_checkpoint(trainer: RecipeTrainer) -> str:
    folders = list_checkpoints(trainer.checkpoints)
    if not folders:
        return "No checkpoint was saved"
    return f"The last checkpoint is {folders[-1]}; the same command goes on from it"
