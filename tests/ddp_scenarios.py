"""What DDP promises and what exactness means, found out by real processes.

`python ddp_scenarios.py FOLDER SET` under torchrun. Each process writes FOLDER/<set>-<world size>-rank<r>.json, and
rank 0 the adapters beside it.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from checkout import ROOT
from tiny_training import NF4, TinyData, build_data
from training_scenarios import logged_losses, one_by_one, run_of, watch_writing

sys.path.insert(0, str(ROOT))

import train_ddp

from tunebook.launching.world import World, read_world

Finding = dict[str, Any]
# 41 rows in sixteens: two whole steps and one of nine rows, which are fewer than the places of eight processes.
NUM_ROWS, GLOBAL_BATCH, EPOCHS = 41, 16, 3
MICRO_BATCHES = (1, 2, 4, 8)
LOOPS = ("trainer", "by hand")


def exact_data() -> TinyData:
    """Return rows of whose gradients none is so near Adam's epsilon that rounding is magnified past 1e-6.

    Of ten seeds four had one element in 8,192 that was (docs/ddp.md, "What rounding does").
    """
    return build_data(num_rows=NUM_ROWS, num_examples=0, seed=5)


def trained(folder: Path, world: World, name: str, loop: str, data: TinyData | None = None, **recipe: Any) -> Finding:
    """Run a recipe to its end by one of the two loops; leave the adapter in the run folder."""
    from tunebook.training.run import train

    began = time.monotonic()
    recipe = {"global_batch_size": GLOBAL_BATCH, "num_train_epochs": EPOCHS, **recipe}
    run = run_of(folder, world, name, data or exact_data(), **recipe)
    result = (train if loop == "trainer" else train_ddp.train)(run)
    summary = {key: value for key, value in vars(result.summary).items() if key != "versions"}
    losses = logged_losses(Path(run.plan.run_dir)) if world.is_main else []
    print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    return {"losses": losses, "summary": summary}


def exact_runs(num_processes: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, loop and recipe of every run that must give the reference's adapter, in a world of this size."""
    fitting = [size for size in MICRO_BATCHES if GLOBAL_BATCH % (size * num_processes) == 0]
    for size in fitting:
        yield f"plain, micro-batch {size}, trainer", "trainer", {"per_device_train_batch_size": size}
    yield f"plain, micro-batch {fitting[-1]}, by hand", "by hand", {"per_device_train_batch_size": fitting[-1]}
    largest = {"quantization": NF4, "per_device_train_batch_size": fitting[-1]}
    yield f"nf4, micro-batch {fitting[-1]}, trainer", "trainer", largest
    for loop in LOOPS:
        micro = {"quantization": NF4, "per_device_train_batch_size": 1}
        yield f"nf4, micro-batch 1, {loop}", loop, micro
        yield f"nf4, checkpointing, {loop}", loop, {**micro, "activation_checkpointing": True}
    if num_processes == 2:
        yield "plain, packed, by hand", "by hand", {"per_device_train_batch_size": fitting[-1], "packing": True}
        packed = {"quantization": NF4, "packing": True, "activation_checkpointing": True}
        yield "nf4, packed, by hand", "by hand", packed


def exactness(folder: Path, world: World) -> Finding:
    """Train the same recipe in every layout that this world allows, by both loops."""
    found = {
        name: trained(folder, world, name, loop, **recipe) for name, loop, recipe in exact_runs(world.num_processes)
    }
    if world.num_processes == 2:
        for loop in LOOPS:
            found[f"other seed, {loop}"] = trained(folder, world, f"other seed, {loop}", loop, seed=7)
    return found


def small_data(folder: Path, world: World) -> Finding:
    """Train on data that fills less than a global batch, or less than one row a place, by both loops."""
    found = {}
    for loop in LOOPS:
        for name, data in small_sets().items():
            found[f"{name}, {loop}"] = trained(
                folder, world, f"{name}, {loop}", loop, data, per_device_train_batch_size=1
            )
    return found


def small_sets() -> dict[str, TinyData]:
    """Return one row; three rows; seventeen, so that a single row is left for the last step; rows of one token."""
    import datasets

    few = {f"{number} rows": build_data(number, num_examples=0) for number in (1, 3, 17)}
    rows = list(few["17 rows"].train)
    bare = [{"input_ids": [65 + number], "labels": [65 + number], "length": 1} for number in range(3)]
    mixed = datasets.Dataset.from_list(bare + rows[:6], features=few["17 rows"].train.features)
    return {**few, "rows of one token": TinyData(mixed, few["17 rows"].evaluation, ())}


def held_out(folder: Path, world: World) -> Finding:
    """Return the held-out loss of one set of weights, by both loops and in batches of several sizes, and its truth."""
    from tunebook.training.run import build_trainer

    found: Finding = {}
    for num_rows in (3, 7):
        data = build_data(num_eval_rows=num_rows, num_examples=0)
        for size in (1, 2, 3, 8):
            micro = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": size}
            run = run_of(folder, world, "evaluation", data, **micro)
            found[f"{num_rows} rows, {size}, trainer"] = build_trainer(run, None).held_out_loss()
            found[f"{num_rows} rows, {size}, by hand"] = train_ddp.Loop(run, None).held_out_loss()
        found[f"{num_rows} rows, true"] = one_by_one(run.model, data.evaluation)
    return found


def global_loss(folder: Path, world: World) -> Finding:
    """Return each logged loss at a rate of 0, and the token mean of the step's rows from one forward per row."""
    data = build_data(num_examples=0)
    found: Finding = {}
    for loop in LOOPS:
        recipe = {"learning_rate": 0.0, "num_train_epochs": 1, "global_batch_size": 8, "per_device_train_batch_size": 1}
        found[loop] = trained(folder, world, f"rate 0, {loop}", loop, data, **recipe)["losses"]
    run = run_of(folder, world, "outside", data, per_device_train_batch_size=1)
    found["true"] = [one_by_one(run.model, data.train.select(rows)) for rows in run.batches.rows_of_steps()]
    shares = [sum(label != -100 for row in range(rank, 8, 2) for label in data.train[row]["labels"]) for rank in (0, 1)]
    found["labels of two halves"] = shares
    return found


def scaled_rate(folder: Path, world: World) -> Finding:
    """Return the rate of the first step where 3e-4 was chosen for one process and the batch grows with the world."""
    found = {}
    for kind in ("none", "linear", "sqrt"):
        for loop in LOOPS:
            name = f"{kind}, {loop}"
            recipe = {"global_batch_size": None, "batch": {"learning_rate_scaling": kind}, "learning_rate": 3e-4}
            recipe |= {"lr_scheduler_type": "constant", "num_train_epochs": 1}
            trained(folder, world, name, loop, build_data(num_rows=8, num_examples=0), **recipe)
            lines = (folder / str(world.num_processes) / name / "metrics.jsonl").read_text().splitlines()
            found[name] = next(event["learning_rate"] for event in map(json.loads, lines) if "loss" in event)
    return found


SETS: dict[str, dict[str, Callable[[Path, World], Finding]]] = {
    "exactness": {
        "exactness": exactness,
        "small data": small_data,
        "held out": held_out,
        "global loss": global_loss,
        "scaled rate": scaled_rate,
    },
}


def main(folder: Path, name: str) -> None:
    """Run the scenarios of a set in the world that the launcher made and write what this rank found."""
    if name == "promises":
        from ddp_promises import PROMISES

        SETS[name] = PROMISES
    world = read_world()
    with contextlib.redirect_stdout((folder / f"{name}-{world.num_processes}-rank{world.rank}.txt").open("w")):
        written = watch_writing(folder / str(world.num_processes), world.rank)
        found: Finding = {}
        with train_ddp.process_group(world, 300):
            for scenario, find in SETS[name].items():
                found[scenario] = find(folder, world)
    found["written"] = list(written)
    found["world"] = {"num_processes": world.num_processes, "rank": world.rank, "backend": world.backend}
    found["threads"] = os.environ.get("OMP_NUM_THREADS")
    (folder / f"{name}-{world.num_processes}-rank{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
