"""`tunebook bench`: a recipe run with several seeds, and its receipt written beside it."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tunebook.errors import EXIT_DONE, Problem, Refused
from tunebook.launching.world import count_gpus, world_of
from tunebook.plan.planning import plan_without_data
from tunebook.plan.table import build_console
from tunebook.recipe.reading import load_recipe
from tunebook.runs.past import read_past_runs
from tunebook.runs.receipts import Entry, build_entry, read_receipt, receipt_path, write_receipt

# What bench sets itself for each run, after the values of the command line; a key that is given twice is refused.
SET_HERE = ("training.seed", "training.data_seed", "hub")


def bench(path: str, overrides: Sequence[str], num_processes: int, num_seeds: int) -> int:
    """Run a recipe once for each seed, from its own on, in folders that are deleted, and write the receipt.

    Rows and their order are the recipe's own in all of them; the seed draws the adapter's start. A seed among the
    `overrides` is that of the first run, and none is published. The folders are where temporary files go (TMPDIR), and
    hold the weights of one run at a time. Returns the exit code of the first run that did not complete, with no receipt
    written. Raises Refused where the recipe cannot run here, or where the receipt cannot be written; what was measured
    is printed then.
    """
    recipe = load_recipe(path, overrides)
    plan_without_data(recipe, world_of(num_processes, "cuda" if count_gpus() else "cpu"), None)
    receipt = receipt_path(path)
    read_receipt(receipt)  # what cannot be read, or written, is refused before the hours, not after
    if not os.access(receipt.parent, os.W_OK):
        fix = "Copy the recipe to a folder of yours"
        raise Refused(Problem("cannot be written to, and the receipt would stand there", fix, str(receipt.parent)))
    from tunebook.launching.launch import find_script, launch

    seeds = [recipe.seed + number for number in range(num_seeds)]
    kept = [override for override in overrides if not _is_set_here(override)]
    fixed = [*kept, f"training.data_seed={recipe.data_seed}", "hub=null"]
    load_recipe(path, [*fixed, f"training.seed={seeds[-1]}"])  # one too large is refused before the hours, too
    with TemporaryDirectory(prefix="tunebook-bench-") as place:
        folders = [str(Path(place) / f"seed-{seed}") for seed in seeds]
        for seed, folder in zip(seeds, folders, strict=True):
            words = [path, *fixed, f"training.seed={seed}", "--run-dir", folder]
            if (code := launch(find_script(), words, num_processes)) != EXIT_DONE:
                again = "No run of a bench is kept: the same bench again starts over"
                print(f"no receipt is written: the run with seed {seed} did not end. {again}", file=sys.stderr)
                return code
            for weights in ("checkpoints", "adapter"):
                shutil.rmtree(Path(folder) / weights, ignore_errors=True)
        entry = build_entry(read_past_runs(folders), seeds, trial=bool(overrides))
    _keep(receipt, entry)
    return EXIT_DONE


def _keep(receipt: Path, entry: Entry) -> None:
    """Write the receipt and print what is in it; print it all where it cannot be written, and raise Refused."""
    try:
        write_receipt(receipt, entry)
    except (OSError, Refused) as error:
        print(json.dumps(entry, indent=1))
        fix = 'What was measured is printed above: it is one of the list {"measured": [...]} of that file'
        raise Refused(Problem(f"cannot be written: {error}", fix, str(receipt))) from error
    console, speed = build_console(), entry["tokens_per_second"]
    console.print(f"receipt: {receipt}", soft_wrap=True, markup=False)
    text = f"{entry['seconds_per_step']:.3f} s per step, {speed['median']:,.0f} trained tokens per second, "
    if not entry["loss_band"]:
        text += "and no loss was logged that a band could be made of"
    for part in entry["loss_band"][-1:]:
        (start, end), (low, high) = part["steps"], part["loss"]
        text += f"loss of steps {start} to {end} between {low:.4f} and {high:.4f}"
    console.print(text, soft_wrap=True, markup=False)


def _is_set_here(override: str) -> bool:
    key = override.partition("=")[0]
    return key in SET_HERE or key.startswith("hub.")
