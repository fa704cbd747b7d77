"""A short measured look at settings: the run's own micro-batches through the run's own model, which stays as it was."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from tunebook.errors import is_out_of_memory
from tunebook.plan.candidates import Candidate
from tunebook.training.batches import Rows, tensors_of
from tunebook.training.head_loss import HeadLoss
from tunebook.training.saving import random_states, restore_random_states

# Settings that are measured, and seconds after which no other one is begun, or the same repeated.
MOST_PROBED: Final = 4
MOST_SECONDS, SECONDS_OF_EACH, MOST_REPEATS = 20.0, 1.0, 5


@dataclass(frozen=True)
class Probe:
    """What one process measured of a candidate: seconds of a usual micro-batch, 0 where it was not tried.

    `peak_bytes` is the most that a GPU held in the fullest micro-batch, 0 on a CPU; where a step has several, with the
    gradients of the one before. `ran_out` tells that memory did.
    """

    seconds: float = 0.0
    peak_bytes: int = 0
    ran_out: bool = False


@dataclass(frozen=True)
class Bench:
    """The model of a run with what makes its loss and its micro-batches."""

    model: Any
    head_loss: HeadLoss
    rows: Rows
    collate: Callable[..., dict[str, Any]]
    device: str
    compute_dtype: str

    def pass_through(self, micro_batch: dict[str, Any]) -> None:
        """Run a micro-batch forward and backward, and wait for the device."""
        inputs, targets = tensors_of(micro_batch, self.device), tensors_of(micro_batch["targets"], self.device)
        dtype = getattr(torch, self.compute_dtype)
        with torch.autocast(torch.device(self.device).type, dtype=dtype, enabled=dtype != torch.float32):
            loss = self.head_loss.sums(self.model, inputs, targets).loss
        (loss / max(micro_batch["num_trained_tokens"], 1)).float().backward()
        self.wait()

    def wait(self) -> None:
        """Return once the device has done what it was given."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)

    def make(self, rows: Sequence[int]) -> dict[str, Any]:
        """Return a micro-batch of rows by number."""
        return self.collate(self.rows.__getitems__(list(rows)))


def probe(candidates: Sequence[Candidate], bench: Bench, checkpointing_kwargs: dict[str, Any] | None) -> list[Probe]:
    """Measure the first few candidates that have memory enough; return a probe for each candidate, in their order.

    Nothing is asked of other processes. What is left is as it was: weights, gradients, buffers, random states.
    """
    found, begun, num_measured = [Probe()] * len(candidates), time.perf_counter(), 0
    with undisturbed(bench.model):
        bench.model.train()
        for place, candidate in enumerate(candidates):
            late = time.perf_counter() - begun > MOST_SECONDS
            if num_measured == MOST_PROBED or (late and num_measured):
                break
            with checkpointing(bench.model, candidate.checkpointing, checkpointing_kwargs):
                found[place] = _measure(candidate, bench)
            num_measured += not found[place].ran_out
            _let_go(bench)
    return found


def _measure(candidate: Candidate, bench: Bench) -> Probe:
    layout = candidate.layout
    assert layout is not None, "the rows of a run are known"
    on_gpu = bench.device.startswith("cuda")
    try:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(bench.device)
        fullest = bench.make(layout.fullest)
        for _ in range(min(layout.num_micro_batches, 2)):
            bench.pass_through(fullest)
        peak = int(torch.cuda.max_memory_allocated(bench.device)) if on_gpu else 0
        seconds: list[float] = []
        usual, begun = bench.make(layout.usual), time.perf_counter()
        while len(seconds) < MOST_REPEATS and (not seconds or time.perf_counter() - begun < SECONDS_OF_EACH):
            since = time.perf_counter()
            bench.pass_through(usual)
            seconds.append(time.perf_counter() - since)
        return Probe(min(seconds), peak)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    return Probe(ran_out=True)


def _let_go(bench: Bench) -> None:
    """Give back what the last candidate held, so that the next one has as much memory as the first."""
    bench.model.zero_grad(set_to_none=True)
    gc.collect()
    if bench.device.startswith("cuda"):
        torch.cuda.empty_cache()


@contextmanager
def checkpointing(model: Any, is_on: bool, kwargs: dict[str, Any] | None) -> Iterator[None]:
    """Have activation checkpointing inside, if `is_on`, and none of it after."""
    if not is_on:
        yield
        return
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    try:
        yield
    finally:
        model.activation_checkpointing_disable()
        # Turning it on had the embedding's output take part in the backward, and turning it off leaves that (5.24).
        model.disable_input_require_grads()


@contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """Have the model, and all random generators, afterwards as they are now, whatever ran through it inside."""
    assert not model.is_activation_checkpointing, "it is turned on when training begins"
    states, was_training = random_states(), model.training
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        model.train(was_training)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for name, buffer in model.named_buffers():
            if name in buffers and buffer.shape == buffers[name].shape:
                buffer.copy_(buffers[name])
        restore_random_states(states)
