"""A run before its first step: arguments, batches and model, built and agreed on by all ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from transformers import TrainingArguments

from tunebook.data.prepare import PreparedData
from tunebook.errors import Refused
from tunebook.findings import find_stop_problems
from tunebook.model import build_model, check_positions, find_model_notes
from tunebook.plan import Plan
from tunebook.plan_table import build_console, print_notes
from tunebook.process_group import refuse_together
from tunebook.recipe.schema import Recipe
from tunebook.training.agreement import check_same_start
from tunebook.training.arguments import build_training_arguments, check_schedule
from tunebook.training.batches import BatchLayout, GlobalBatchSampler, build_train_batches, join_rows, pad_right
from tunebook.training.head_loss import HeadLoss
from tunebook.training.measuring import Stopwatch
from tunebook.training.packing import check_rows_apart
from tunebook.world import World

# Of which all ranks need the same version: another one may draw, round or lay out batches in another way.
PACKAGES = ("tunebook", "torch", "transformers", "accelerate", "peft", "bitsandbytes", "datasets", "tokenizers")


@dataclass(frozen=True)
class ReadyRun:
    """Everything a run needs, built and accepted; nothing is written yet. `wall` counts since the building began."""

    recipe: Recipe
    plan: Plan
    world: World
    tokenizer: Any
    data: PreparedData
    arguments: TrainingArguments
    batches: GlobalBatchSampler
    model: Any
    head_loss: HeadLoss
    wall: Stopwatch

    @property
    def collate(self) -> Callable[..., dict[str, Any]]:
        """What makes a micro-batch of rows, in training and in evaluation."""
        return join_rows if self.recipe.data.packing else pad_right


def build_run(recipe: Recipe, plan: Plan, world: World, tokenizer: Any, data: PreparedData) -> ReadyRun:
    """Build arguments, batches and model; every rank raises the same Refused where any of them cannot be had."""
    wall = Stopwatch()
    wall.start()
    check_same_start(start_facts(recipe, plan, data))
    with refuse_together():
        if problems := find_stop_problems(recipe, tokenizer, data):
            raise Refused(problems)
        arguments = build_training_arguments(recipe, plan, world)
        layout = BatchLayout(
            plan.global_batch_size,
            world.num_processes,
            plan.gradient_accumulation_steps,
            world.rank,
            packed=recipe.data.packing,
        )
        lengths = data.train["length"]
        batches = build_train_batches(lengths, layout, recipe.data_seed, arguments.dataloader_drop_last)
        check_schedule(arguments, plan)
        model = build_model(recipe, plan, world, tokenizer)
        check_positions(recipe, model, data.longest_row, plan.per_device_train_batch_size)
        if recipe.data.packing:
            check_rows_apart(recipe, model, plan.compute_dtype)
        in_pieces, compiled = recipe.batch.fused_loss == "auto", arguments.torch_compile
        head_loss = HeadLoss(model, plan.compute_dtype, in_pieces, compiled)
    if world.is_main:
        print_notes(find_model_notes(recipe, plan, model), build_console())
    return ReadyRun(recipe, plan, world, tokenizer, data, arguments, batches, model, head_loss, wall)


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
        **{name: version(name) for name in PACKAGES},
        **_by_key(recipe.resolved),
    }


def _by_key(values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return nested values by their dotted keys."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _by_key(value, f"{section}{name}.") if isinstance(value, Mapping) else {f"{section}{name}": value}
    return found
