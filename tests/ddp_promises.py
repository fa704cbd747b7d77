"""What DDP promises, looked at from inside the processes of a group; run by ddp_scenarios.py.

Each function takes the folder and the world and returns what this rank saw. `watched` runs either loop.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import train_ddp
from torch import distributed
from torch.profiler import ProfilerActivity
from transformers import TrainerCallback

from ddp_scenarios import LOOPS, Finding, trained
from tiny_training import build_data
from training_scenarios import run_of
from tunebook.errors import Refused, TrainingFailed
from tunebook.launching.world import World
from tunebook.model.adapter import adapter_tensors, tensor_sha256
from tunebook.training.batches import FILLER_ROW, Rows

# 21 rows in eights, in micro-batches of one: a step of two processes has four micro-steps.
RECIPE = {"global_batch_size": 8, "per_device_train_batch_size": 1, "num_train_epochs": 2, "max_grad_norm": 0.0}


class Watch(TrainerCallback):
    """Calls `before_step(model, step)` with the reduced gradients there, and `after_step` with the new weights."""

    def __init__(self, before_step: Callable[[Any, int], None], after_step: Callable[[Any, int], None]) -> None:
        self.before_step, self.after_step = before_step, after_step

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.before_step(model, state.global_step + 1)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.after_step(model, state.global_step)


def nothing(model: Any, step: int) -> None:
    """See nothing."""


def watched(run: Any, loop: str, before_step: Any = nothing, after_step: Any = nothing) -> Any:
    """Return the loop of a run, not yet trained, with a look at the model around each step."""
    from tunebook.training.run import build_trainer

    if loop == "trainer":
        trainer = build_trainer(run, None)
        # First of all callbacks, so that what it changes is seen by the product's own checks.
        trainer.callback_handler.callbacks.insert(0, Watch(before_step, after_step))
        return trainer
    by_hand = train_ddp.Loop(run, None)
    by_hand.optimizer.register_step_pre_hook(lambda *_: before_step(run.model, by_hand.state.global_step + 1))
    step = by_hand.progress.step

    def stepped(epoch: float) -> Any:
        due = step(epoch)
        after_step(run.model, by_hand.state.global_step)
        return due

    by_hand.progress.step = stepped
    return by_hand


def trained_parameters(model: Any) -> dict[str, Any]:
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


def mean_gradient(folder: Path, world: World) -> Finding:
    """Return how far the gradient of step 1 is from the mean of what each rank's own backward gives, without DDP."""
    data, found = build_data(num_examples=0), {}
    for loop in LOOPS:
        run = run_of(folder, world, "gradient", data, **RECIPE)
        own = own_gradient(run, world)
        everyone: list[Any] = [None] * world.num_processes
        distributed.all_gather_object(everyone, own)
        seen: dict[str, Any] = {}

        def look(model: Any, step: int, seen: dict[str, Any] = seen) -> None:
            if step == 1:
                seen.update({name: one.grad.clone() for name, one in trained_parameters(model).items()})

        watched(run, loop, look).train()
        means = {name: sum(one[name] for one in everyone) / world.num_processes for name in own}
        found[loop] = {
            "from the mean": max(float((seen[name] - means[name]).abs().max()) for name in means),
            "from the own": max(float((seen[name] - own[name]).abs().max()) for name in means),
            "largest": max(float(one.abs().max()) for one in means.values()),
        }
    return found


def own_gradient(run: Any, world: World) -> dict[str, Any]:
    """Return this rank's gradient of the rows it has in step 1, the loss scaled by the number of ranks; no DDP."""
    run.batches.set_epoch(0)
    window = range(run.plan.gradient_accumulation_steps)
    rows = [row for batch, _ in zip(run.batches, window, strict=False) for row in batch]
    everything = next(run.batches.rows_of_steps())
    num_labels = sum(label != -100 for row in everything for label in run.data.train[row]["labels"][1:])
    for row in (row for row in rows if row != FILLER_ROW):
        ids, labels = (torch.tensor([run.data.train[row][name]]) for name in ("input_ids", "labels"))
        logits = run.model(input_ids=ids).logits
        losses = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
        (losses * world.num_processes / num_labels).backward()
    own = {name: one.grad.clone() for name, one in trained_parameters(run.model).items()}
    run.model.zero_grad()
    return own


def replicas(folder: Path, world: World) -> Finding:
    """Return the hash of this rank's weights after each step, with the product's own comparison on."""
    found = {}
    for loop in LOOPS:
        hashes: list[str] = []
        run = run_of(folder, world, "replicas", build_data(num_examples=0), **RECIPE, batch={"check_replicas": 1})

        def look(model: Any, step: int, hashes: list[str] = hashes) -> None:
            hashes.append(tensor_sha256(adapter_tensors(model)))

        watched(run, loop, after_step=look).train()
        found[loop] = hashes
    return found


def parted(folder: Path, world: World) -> Finding:
    """Return how training ends when the last rank's weights change by one bit after step 3."""
    found: Finding = {}

    def disturb(model: Any, step: int) -> None:
        if step != 3:
            return
        name = sorted(trained_parameters(model))[3]
        flat = trained_parameters(model)[name].data.view(-1)
        # Of a number whose exponent the next step changes, the last bit may be rounded away; of this one it is not.
        flat[0] = 0.75
        if world.rank == world.num_processes - 1:
            flat[0] = torch.nextafter(flat[0], torch.tensor(9.0))
            found["tensor"] = name

    for loop in LOOPS:
        run = run_of(folder, world, "parted", build_data(num_examples=0), **RECIPE, batch={"check_replicas": 2})
        try:
            watched(run, loop, after_step=disturb).train()
        except TrainingFailed as failure:
            found[loop] = {"said": str(failure), "by all": failure.befell == "all"}
    return found


@contextlib.contextmanager
def recorded_rows() -> Iterator[list[tuple[int, list[int]]]]:
    """Record the rows that are read, with the number of rows of the set they are read from."""
    asked: list[tuple[int, list[int]]] = []
    original = Rows.__getitems__

    def recording(self: Rows, rows: list[int]) -> Any:
        asked.append((len(self), list(rows)))
        return original(self, rows)

    Rows.__getitems__ = recording  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        Rows.__getitems__ = original  # type: ignore[method-assign]


def rows_of_an_epoch(folder: Path, world: World) -> Finding:
    """Return the rows this rank trained in two epochs, in order, and those it evaluated each time."""
    found = {}
    for loop in LOOPS:
        run = run_of(folder, world, "rows", build_data(num_rows=21, num_eval_rows=7, num_examples=0), **RECIPE)
        with recorded_rows() as asked:
            watched(run, loop).train()
        micro_batches = [rows for size, rows in asked if size == 21]
        whole = len(micro_batches) // 2
        epochs = (micro_batches[:whole], micro_batches[whole:])
        evaluated = [row for size, rows in asked if size == 7 for row in rows]
        found[loop] = {
            "epochs": [[row for rows in epoch for row in rows if row != FILLER_ROW] for epoch in epochs],
            "evaluated": [row for row in evaluated if row != FILLER_ROW],
        }
    return found


def collectives(folder: Path, world: World) -> Finding:
    """Return what travelled in each step, operation and elements, as the backend itself recorded it."""
    found = {}
    for loop in LOOPS:
        quiet = {"eval_strategy": "no", "logging_steps": 100}
        run = run_of(folder, world, "collectives", build_data(num_examples=0), **RECIPE, **quiet)
        steps: list[dict[str, int]] = []
        profiles: list[Any] = []

        def record(*_: Any, profiles: list[Any] = profiles, steps: list[Any] = steps) -> None:
            if profiles:
                profiles[-1].__exit__(None, None, None)
                events = [event for event in profiles[-1].events() if event.name.startswith("gloo:")]
                steps.append(dict(Counter(f"{event.name[5:]} {event.input_shapes[0][0]}" for event in events)))
            profiles.append(torch.profiler.profile(record_shapes=True, activities=[ProfilerActivity.CPU]))
            profiles[-1].__enter__()

        training = watched(run, loop, after_step=record)
        training.train()
        profiles[-1].__exit__(None, None, None)
        elements = sum(one.numel() for one in trained_parameters(run.model).values())
        found[loop] = {
            "steps": steps,
            "trained": elements,
            "micro-steps": run.plan.gradient_accumulation_steps,
        }
    return found


def other_runs(folder: Path, world: World) -> Finding:
    """Return what this rank says where the last rank has fewer rows, and where it has another recipe."""
    is_last = world.rank == world.num_processes - 1
    wrong = {
        "rows": {"data": build_data(num_rows=13 if is_last else 21)},
        "recipe": {"data": build_data(), "learning_rate": 2e-3 if is_last else 1e-3},
    }
    found = {}
    for name, given in wrong.items():
        try:
            run_of(folder, world, name, **{**RECIPE, **given})
        except Refused as refused:
            found[name] = refused.render()
    return found


@contextlib.contextmanager
def skipping(model: Any, when: Callable[[], bool]) -> Iterator[None]:
    """Make the model pass by the adapter of its first up_proj while `when()` holds."""
    layer = next(one for name, one in model.named_modules() if name.endswith("0.mlp.up_proj"))
    forward = layer.forward

    def branching(*inputs: Any, **named: Any) -> Any:
        return (layer.base_layer if when() else forward)(*inputs, **named)

    layer.forward = branching
    try:
        yield
    finally:
        layer.forward = forward


def unused(folder: Path, world: World) -> Finding:
    """Return how training ends where a branch skips parameters: always, in last micro-steps only, and when allowed."""
    found: Finding = {}
    for loop in LOOPS:
        for name, allowed in (("always", False), ("last micro-step", False), ("allowed", True)):
            recipe = {**RECIPE, "eval_strategy": "no", "ddp_find_unused_parameters": allowed}
            run = run_of(folder, world, "unused", build_data(num_examples=0), **recipe)
            calls, number = [0], run.plan.gradient_accumulation_steps

            def when(name: str = name, calls: list[int] = calls, number: int = number) -> bool:
                calls[0] += 1
                return name != "last micro-step" or calls[0] % number == 0

            with skipping(run.model, when):
                try:
                    training = watched(run, loop)
                    training.train()
                    found[f"{name}, {loop}"] = training.state.global_step
                except TrainingFailed as failure:
                    found[f"{name}, {loop}"] = str(failure)
    return found


def unused_on_one_rank(folder: Path, world: World) -> Finding:
    """Return how a rank ends that alone skips parameters; comes last, since the others wait until it is gone."""
    run = run_of(folder, world, "one rank", build_data(num_examples=0), **RECIPE, eval_strategy="no")
    with skipping(run.model, lambda: world.rank == world.num_processes - 1):
        try:
            train_ddp.Loop(run, None).train()
        except TrainingFailed as failure:
            return {"said": str(failure), "by all": failure.befell == "all"}
        except RuntimeError as error:
            return {"waited": str(error)[:200]}
    return {}


def printed(folder: Path, world: World) -> Finding:
    """Train by hand to the end, for what is written and printed on the way."""
    return {"status": trained(folder, world, "printed", "by hand")["summary"]["status"]}


PROMISES: dict[str, Callable[[Path, World], Finding]] = {
    "mean gradient": mean_gradient,
    "replicas": replicas,
    "parted": parted,
    "rows of an epoch": rows_of_an_epoch,
    "collectives": collectives,
    "other runs": other_runs,
    "unused": unused,
    "printed": printed,
    "unused on one rank": unused_on_one_rank,
}
