"""Whether a run begins, or goes on from a checkpoint: decided by rank 0, agreed on by all, said before weights load."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunebook.data.prepare import PreparedData
from tunebook.errors import Problem, Refused
from tunebook.launching.process_group import refuse_together
from tunebook.launching.world import World
from tunebook.model.model import load_architecture
from tunebook.plan.plan import Plan
from tunebook.plan.randomness import random_settings
from tunebook.plan.table import build_console, print_notes
from tunebook.recipe.schema import Recipe
from tunebook.runs.checkpoints import MANIFEST, Checkpoint, NotWhole, check_whole, find_newest
from tunebook.runs.folder import is_unfinished, read_begun
from tunebook.runs.identity import (
    SCHEDULE,
    Identity,
    base_of,
    find_differences,
    find_taken_over,
    recipe_identity,
    taken_over,
    tokenizer_digest,
)
from tunebook.system.writing import restore_earlier
from tunebook.training.collectives import from_rank_0


@dataclass(frozen=True)
class Start:
    """How a run starts: from a checkpoint or from step 0, in the folder as it is or with what is there set aside."""

    identity: Identity
    checkpoint: Checkpoint | None = None
    keep: bool = False
    notes: tuple[str, ...] = ()


def find_start(  # noqa: PLR0913, PLR0917 - what a run is made of
    recipe: Recipe, plan: Plan, world: World, tokenizer: Any, data: PreparedData, fresh: bool
) -> Start:
    """Return how the run starts, the same on every rank; rank 0 prints what is gone on with and what is taken over.

    Raises Refused where an unfinished run in the folder would end with another result, or where a rank cannot read the
    checkpoint that rank 0 chose.
    """
    start: Start | None = None
    with refuse_together():
        if world.is_main:
            start = _decide(recipe, plan, build_identity(recipe, plan, tokenizer, data), fresh)
            if world.shards and start.checkpoint is not None:
                raise Refused(_no_shards(start.checkpoint))
    start = from_rank_0(start)
    assert start is not None
    with refuse_together():
        if start.checkpoint is not None:
            _check_visible(start.checkpoint, world)
    if world.is_main:
        print_notes(start.notes, build_console())
    return start


def build_identity(recipe: Recipe, plan: Plan, tokenizer: Any, data: PreparedData) -> Identity:
    """Return all that the result depends on: what recipe and plan say, the rows, the tokenizer and the base."""
    return {
        **recipe_identity(recipe, plan),
        "data": data.data_fingerprint,
        "tokenizer": tokenizer_digest(tokenizer),
        "base model": base_of(recipe, lambda: getattr(load_architecture(recipe), "_commit_hash", None)),
    }


def _decide(recipe: Recipe, plan: Plan, identity: Identity, fresh: bool) -> Start:
    folder = Path(plan.run_dir)
    if fresh or not is_unfinished(folder):
        return Start(identity)
    begun = read_begun(plan.run_dir)
    if begun is None:  # broken off before it came to anything
        return Start(identity, keep=True)
    problems = find_differences(begun.identity, identity, plan.run_dir)
    if problems:
        raise Refused(problems)
    restore_earlier(folder / "checkpoints")
    needs_best = bool(recipe.arguments.get("load_best_model_at_end"))
    checkpoint, skipped = find_newest(folder / "checkpoints", needs_best)
    if checkpoint is None:
        # Nothing of the earlier one is left in it, so what differs needs no word.
        again = f"no whole checkpoint in {folder}: the unfinished run there starts again from step 0"
        return Start(identity, None, True, (*skipped, again))
    _check_length(plan, checkpoint)
    notes = find_taken_over(begun.settings, taken_over(recipe, plan), random_settings(recipe))
    for key in SCHEDULE:
        before, now = begun.identity.get(key), identity.get(key)
        if before != now:
            before, now = (json.dumps(value).removesuffix(".0") for value in (before, now))
            notes.append(f"{key}: {now}, was {before}; the adapter is not that of a run planned so from its start")
    notes += skipped
    notes.append(f"going on from {checkpoint.folder}, after step {checkpoint.step} of {plan.num_optimizer_steps}")
    return Start(identity, checkpoint, True, tuple(notes))


def _check_length(plan: Plan, checkpoint: Checkpoint) -> None:
    total = plan.num_optimizer_steps
    if total is not None and checkpoint.step > total:
        message = f"{checkpoint.folder} is after step {checkpoint.step}, and this run would end at step {total}"
        fix = "Restore num_train_epochs or max_steps, or add --fresh to set that run aside and start over"
        raise Refused(Problem(message, fix, plan.recipe, "training"))


def _no_shards(checkpoint: Checkpoint) -> Problem:
    fix = "Start it with accelerate_configs/ddp.yaml, or add --fresh to set that run aside and start over"
    return Problem(
        "was saved by a run that did not shard the model, and FSDP2 does not go on from it", fix, str(checkpoint.folder)
    )


def _check_visible(chosen: Checkpoint, world: World) -> None:
    """Refuse where this rank cannot read the checkpoint, or reads another one at its place."""
    if world.is_main:
        return
    where = str(chosen.folder / MANIFEST)
    fix = "Put the run folder where every machine sees it, by --run-dir DIR"
    try:
        seen = check_whole(chosen.folder)
    except NotWhole as error:
        raise Refused(Problem(f"cannot be read on this machine: {error}", fix, where)) from error
    if replace(seen, folder=chosen.folder) != chosen:
        raise Refused(Problem("is not the checkpoint that rank 0 goes on from", fix, where))
