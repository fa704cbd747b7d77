"""Runs that are compared across process counts: `python training_scenarios.py FOLDER` under any launcher, or imported.

Each process writes FOLDER/<world size>/rank<r>.json, and rank 0 the adapters beside it.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tiny_training import NF4, TinyData, build_base, build_data, build_recipe, plan_of
from tunebook.launching.process_group import start_process_group, stop_process_group
from tunebook.launching.world import World, read_world

Finding = dict[str, Any]
# Conditions of exactness: float32, a rate of at most 1e-3, no dropout, few steps, a ragged tail (21 rows in eights).
EPOCHS = 3


@contextmanager
def compiling_alone(folder: Path) -> Iterator[None]:
    """Make a base in `folder`/base and a process group of one; what was compiled meanwhile is forgotten after it."""
    import torch

    start_process_group(World())
    build_base(folder / "base")
    try:
        yield
    finally:
        torch.compiler.reset()
        stop_process_group()


def run_of(folder: Path, world: World, name: str, data: TinyData, compute_dtype: str = "float32", **recipe: Any) -> Any:
    from accelerate.state import AcceleratorState
    from transformers import AutoTokenizer

    from tunebook.training.ready import build_run

    AcceleratorState._reset_state()  # precision is told to accelerate once in a process, and runs here differ in it
    base = folder / "base"
    accepted = build_recipe(
        base, **{"num_train_epochs": EPOCHS, "activation_checkpointing": False, "logging_steps": 1, **recipe}
    )
    run_dir = folder / str(world.num_processes) / name
    plan = replace(plan_of(accepted, world, data, run_dir), compute_dtype=compute_dtype)
    return build_run(accepted, plan, world, AutoTokenizer.from_pretrained(base), data)


def trained(folder: Path, world: World, name: str, data: TinyData | None = None, **recipe: Any) -> Finding:
    """Run a recipe to its end; return its losses, and leave its adapter in the run folder."""
    from tunebook.training.run import train

    data = data or build_data()
    result = train(run_of(folder, world, name, data, **recipe))
    summary = {key: value for key, value in vars(result.summary).items() if key != "versions"}
    losses = logged_losses(Path(result.summary.adapter_dir).parent) if world.is_main else []
    return {"losses": losses, "summary": summary, "answers": result.after.answers, "notes": result.notes}


def logged_losses(run_dir: Path) -> list[float]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [event["loss"] for event in map(json.loads, lines) if "loss" in event]


def starts(folder: Path, world: World) -> Finding:
    """Return the hash of the adapter before step 1 on this rank, for two seeds and two ways to hold the base."""
    from tunebook.model.adapter import adapter_tensors, tensor_sha256

    found = {}
    for seed in (0, 1):
        for held, quantization in (("plain", None), ("nf4", NF4)):
            run = run_of(folder, world, "start", build_data(), quantization=quantization, seed=seed)
            found[f"{held} {seed}"] = tensor_sha256(adapter_tensors(run.model))
    return found


def evaluations(folder: Path, world: World) -> Finding:
    """Return the held-out loss of one set of weights at several evaluation batch sizes, and its true value."""
    from tunebook.training.run import build_trainer

    data = build_data(num_eval_rows=7)
    found: Finding = {}
    for size in (1, 2, 3, 8):
        run = run_of(folder, world, "evaluation", data, per_device_eval_batch_size=size)
        found[str(size)] = build_trainer(run, None).evaluate()["eval_loss"]
    found["true"] = one_by_one(run.model, data.evaluation)
    return found


def one_by_one(model: Any, rows: Any) -> float:
    """Return the mean loss of all labels, from one forward per row, with nothing of tunebook's in it."""
    import torch

    total, count = 0.0, 0
    for row in rows:
        labels = torch.tensor([row["labels"]])
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([row["input_ids"]]), labels=labels).loss.double()
        number = int((labels[:, 1:] != -100).sum())
        total, count = total + loss.item() * number, count + number
    return total / count


def first_loss(folder: Path, world: World) -> Finding:
    """Return the token mean of the rows of step 1 at the starting weights, from one forward per row."""
    data = build_data()
    run = run_of(folder, world, "first", data)
    rows = data.train.select(next(run.batches.rows_of_steps()))
    return {"true": one_by_one(run.model, rows)}


def resumed(folder: Path, world: World, **recipe: Any) -> Finding:
    """Break off inside epoch 2, go on from that checkpoint, and return the difference to the unbroken run."""
    from tunebook.model.adapter import adapter_tensors
    from tunebook.runs.checkpoints import check_whole
    from tunebook.training.run import build_trainer

    data = build_data()
    recipe = {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "no", **recipe}
    whole = build_trainer(run_of(folder, world, "resumed", data, **recipe), None)
    whole.train()
    expected = adapter_tensors(whole.model)
    again = build_trainer(run_of(folder, world, "resumed", data, **recipe), None)
    checkpoint = check_whole(Path(whole.args.output_dir) / "checkpoint-5")
    again.go_on_from(checkpoint)
    again.train_on(checkpoint)
    found = adapter_tensors(again.model)
    return {"difference": max(float((found[name] - expected[name]).abs().max()) for name in expected)}


def broken(folder: Path, world: World) -> Finding:
    """Return how a run ends whose loss becomes NaN."""
    from tunebook.errors import TrainingFailed
    from tunebook.training.run import train

    run = run_of(folder, world, "broken", build_data(), learning_rate=1e30, max_grad_norm=0.0)
    try:
        train(run)
    except TrainingFailed as error:
        return {"error": str(error)}
    return {"error": None}


def agreed(folder: Path, world: World) -> Finding:
    """Return the refusal that this rank raises when only the last rank's machine lacks the model."""
    import tunebook.training.ready as module
    from tunebook.errors import Problem, Refused

    def build_nothing(*arguments: Any) -> Any:
        raise Refused(Problem("no such folder here"))

    build_model = module.build_model
    if world.rank == world.num_processes - 1:
        module.build_model = build_nothing
    try:
        run_of(folder, world, "agreed", build_data())
    except Refused as refused:
        return {"refusal": refused.render()}
    finally:
        module.build_model = build_model
    return {"refusal": None}


SCENARIOS: dict[str, Callable[[Path, World], Finding]] = {
    "starts": starts,
    "plain": lambda folder, world: trained(folder, world, "plain"),
    "nf4": lambda folder, world: trained(folder, world, "nf4", quantization=NF4),
    # The same training rows with nothing held out, so that nothing is measured before, between and after.
    "unmeasured": lambda folder, world: trained(
        folder, world, "unmeasured", build_data(num_eval_rows=0), quantization=NF4, validation=0.0
    ),
    "workers": lambda folder, world: trained(folder, world, "workers", dataloader_num_workers=1),
    # More places (processes x micro-steps) than the tail has rows, so fillers stand in it.
    "fillers": lambda folder, world: trained(folder, world, "fillers", per_device_train_batch_size=1),
    "few rows": lambda folder, world: trained(folder, world, "few", build_data(num_rows=3)),
    "checkpointing": lambda folder, world: trained(
        folder, world, "checkpointing", quantization=NF4, activation_checkpointing=True, save_strategy="epoch"
    ),
    "bfloat16": lambda folder, world: trained(
        folder, world, "bfloat16", quantization=NF4, compute_dtype="bfloat16", num_train_epochs=1
    ),
    "packed": lambda folder, world: trained(folder, world, "packed", packing=True),
    "packed nf4": lambda folder, world: trained(folder, world, "packed nf4", quantization=NF4, packing=True),
    "full": lambda folder, world: trained(folder, world, "full", lora=None),
    "evaluations": evaluations,
    "first loss": first_loss,
    "resumed": resumed,
    "packed and resumed": partial(resumed, packing=True),
    "broken": broken,
    "agreed": agreed,
}


def watch_writing(folder: Path, rank: int) -> list[str]:
    """Return a list that fills with the paths below `folder` that this process opens for writing, makes or moves.

    What torch and safetensors write from native code raises no audit event: files of a rank above 0 can be told by
    their mode, which others may write, and safetensors by its one way into native code.
    """
    import safetensors.torch

    os.umask(0o022 if rank == 0 else 0o000)
    written: list[str] = []
    inside = f"{folder}{os.sep}"
    serialize = safetensors.torch.serialize_file

    def serialize_file(tensors: Any, path: Any, *arguments: Any, **named: Any) -> Any:
        written.append(os.fsdecode(path))
        return serialize(tensors, path, *arguments, **named)

    safetensors.torch.serialize_file = serialize_file

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        paths: tuple[Any, ...] = ()
        if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            writes = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            paths = arguments[:1] if writes else ()
        elif event in ("os.mkdir", "os.remove", "os.rmdir"):
            paths = arguments[:1]
        elif event == "os.rename":
            paths = arguments[:2]
        written.extend(str(path) for path in map(os.fsdecode, paths) if path.startswith(inside))

    sys.addaudithook(hook)
    return written


def run_all(folder: Path, world: World) -> Finding:
    """Run every scenario in this process and return what was found, with the seconds of each."""
    found: Finding = {}
    for name, scenario in SCENARIOS.items():
        began = time.monotonic()
        found[name] = scenario(folder, world)
        print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    return found


def main(folder: Path) -> None:
    """Run every scenario in the world that the launcher made and write what this rank found."""
    world = read_world()
    written = watch_writing(folder / str(world.num_processes), world.rank)
    start_process_group(world)
    found = run_all(folder, world)
    found["written"] = list(written)
    found["world"] = {"num_processes": world.num_processes, "rank": world.rank, "backend": world.backend}
    stop_process_group()
    (folder / f"{world.num_processes}-rank{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
