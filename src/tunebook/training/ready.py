"""A run before its first step: arguments, batches and model, built and agreed on by all ranks."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from tunebook.data.prepare import PreparedData
from tunebook.errors import Refused, TrainingFailed, is_out_of_memory
from tunebook.launching.process_group import refuse_together
from tunebook.launching.world import World
from tunebook.model.model import build_model, check_positions, find_model_notes
from tunebook.plan.findings import find_stop_problems
from tunebook.plan.plan import Plan
from tunebook.plan.schedule import find_schedule_problems
from tunebook.plan.table import build_console, print_notes
from tunebook.recipe.schema import Recipe
from tunebook.runs.past import by_key
from tunebook.system.collection import collect_as_usual
from tunebook.training.agreement import check_same_start
from tunebook.training.arguments import build_training_arguments, check_optimizer
from tunebook.training.batches import BatchLayout, GlobalBatchSampler, Rows, build_train_batches, join_rows, pad_right
from tunebook.training.choosing import choose, open_options
from tunebook.training.head_loss import HeadLoss
from tunebook.training.measuring import Stopwatch
from tunebook.training.packing import check_rows_apart
from tunebook.training.probing import Bench

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


def build_run(  # noqa: PLR0913, PLR0917 - what a run is made of
    recipe: Recipe, plan: Plan, world: World, tokenizer: Any, data: PreparedData, goes_on: bool = False
) -> ReadyRun:
    """Build arguments, batches and model; every rank raises the same Refused where any of them cannot be had.

    What a recipe leaves open (`auto`) is chosen here, or kept where the run in the folder is gone on with (`goes_on`).
    Raises TrainingFailed on the rank that has no memory for the model.
    """
    collect_as_usual()
    wall = Stopwatch()
    wall.start()
    check_same_start(start_facts(recipe, plan, data))
    options = open_options(recipe, plan, world, data, goes_on)
    plan = options.plan
    with _explaining_no_memory(recipe, plan, world), refuse_together():
        if problems := find_stop_problems(recipe, tokenizer, data):
            raise Refused(problems)
        arguments, batches = _build_batches(recipe, plan, world, data)
        check_optimizer(arguments)
        if problems := find_schedule_problems(recipe, plan):
            raise Refused(problems)
        model = build_model(recipe, plan, world, tokenizer)
        is_open = bool(options.candidates) and recipe.chooses_micro_batch
        check_positions(recipe, model, data.longest_row, 1 if is_open else plan.per_device_train_batch_size)
        if recipe.data.packing:
            check_rows_apart(recipe, model, plan.compute_dtype)
        in_pieces, compiled = recipe.batch.fused_loss == "auto", arguments.torch_compile
        head_loss = HeadLoss(model, plan.compute_dtype, in_pieces, compiled)
    if options.candidates:
        collate = join_rows if recipe.data.packing else pad_right
        bench = Bench(model, head_loss, Rows(data.train), collate, world.device, plan.compute_dtype)
        plan = choose(options, recipe, world, data, bench, arguments)
        with refuse_together():
            arguments, batches = _build_batches(recipe, plan, world, data)
    if world.is_main:
        print_notes(find_model_notes(recipe, plan, model), build_console())
    return ReadyRun(recipe, plan, world, tokenizer, data, arguments, batches, model, head_loss, wall)


def _build_batches(
    recipe: Recipe, plan: Plan, world: World, data: PreparedData
) -> tuple[TrainingArguments, GlobalBatchSampler]:
    arguments = build_training_arguments(recipe, plan, world)
    layout = BatchLayout(
        plan.global_batch_size,
        world.num_processes,
        plan.gradient_accumulation_steps,
        world.rank,
        packed=recipe.data.packing,
    )
    lengths = data.train["length"]
    return arguments, build_train_batches(lengths, layout, recipe.data_seed, arguments.dataloader_drop_last)


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
        **by_key(recipe.resolved),
    }


@contextmanager
def _explaining_no_memory(recipe: Recipe, plan: Plan, world: World) -> Iterator[None]:
    """Turn running out of memory inside into TrainingFailed; the others learn of it by this rank's end."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingFailed(_render_no_memory(recipe, plan, world), befell="this rank") from error


def _render_no_memory(recipe: Recipe, plan: Plan, world: World) -> str:
    """Return what did not fit, what would need less, and how to see what fits before it is tried."""
    advice = ["a smaller model"]
    if not (recipe.quantization or {}).get("load_in_4bit"):
        lora = "" if recipe.lora is not None else "lora: {} and "
        advice.insert(0, f"{lora}quantization: {{load_in_4bit: true}}")
    if world.device_type == "cpu" and world.num_local_processes > 1:
        advice.append(f"fewer than {world.num_local_processes} processes, each of which holds all of it")
    return (
        f"out of memory before step 1, while {plan.model} was loaded ({plan.method}, {plan.compute_dtype}, on "
        f"{world.device}). Less memory: {'; or '.join(advice)}. What fits is seen beforehand: "
        f"{Path(sys.argv[0]).name} {recipe.path} --plan --gpu GIB"
    )
