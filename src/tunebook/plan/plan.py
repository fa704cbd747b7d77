"""The plan: what this run will do, everything derived, nothing optional."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tunebook.errors import Problem, Refused
from tunebook.launching.sharding import SHARDING_NOTE, check_sharding
from tunebook.launching.world import World
from tunebook.model.attention import attention_notes, check_attention
from tunebook.model.shapes import ModelShape, count_lora_parameters, find_config, find_shape
from tunebook.plan.arithmetic import DECIDED_AT_START, count_held_out, counted, derive_batches, scale_learning_rate
from tunebook.plan.randomness import random_notes
from tunebook.recipe.defaults import OUR_DEFAULTS
from tunebook.recipe.schema import AUTO, Recipe
from tunebook.recipe.upstream import lora_keys, training_keys

OURS = "default of tunebook"


@dataclass(frozen=True)
class Plan:
    """What one run will do. What is not known yet (rows, the shape of a model never seen) is None.

    `origins` says for each field where its number came from: the recipe, the command line, a default and whose, the
    world, or the arithmetic that gave it. `choice` is what `auto` was decided by, once it is.
    """

    recipe: str
    run_dir: str
    adapter_dir: str
    model: str
    model_revision: str | None
    model_parameters: int | None
    method: str
    trainable_parameters: int | None
    compute_dtype: str
    world_size: int
    device_type: str
    backend: str | None
    global_batch_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    learning_rate: float
    lr_scheduler_type: str
    warmup_steps: float
    optim: str
    num_train_epochs: float | None
    max_steps: int | None
    num_train_rows: int | None
    num_eval_rows: int | None
    steps_per_epoch: int | None
    num_optimizer_steps: int | None
    dataloader_drop_last: bool
    max_length: int
    activation_checkpointing: bool
    seed: int
    data_seed: int
    notes: tuple[str, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)
    choice: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, for plan.json and --json."""
        return asdict(self)


@dataclass(frozen=True)
class Setting:
    """A value of the plan and where it came from."""

    value: Any
    origin: str


def build_plan(recipe: Recipe, world: World, *, run_dir: str | None = None, bf16_supported: bool = True) -> Plan:
    """Derive the plan of an accepted recipe in a world. Rows are not known yet; see `with_rows`.

    `bf16_supported` says whether the GPUs of the world compute in bfloat16; it matters on GPUs only. Raises Refused
    with every reason why the recipe cannot run in this world.
    """
    problems: list[Problem] = []
    dtype = _compute_dtype(recipe, world, bf16_supported, problems)
    _check_device(recipe, world, problems)
    config = find_config(recipe.model.name_or_path, recipe.model.revision)
    problems += check_attention(recipe, config)
    problems += check_sharding(recipe) if world.shards else []
    batches = derive_batches(recipe, world.num_processes, problems)
    if problems or batches is None:
        raise Refused(problems)
    settings = {
        **_places(recipe, run_dir),
        **_base(recipe, find_shape(recipe.model.name_or_path, recipe.model.revision)),
        "compute_dtype": dtype,
        **_world(recipe, world),
        "global_batch_size": Setting(batches.whole, batches.origins["global_batch_size"]),
        "per_device_train_batch_size": Setting(batches.micro, batches.origins["per_device_train_batch_size"]),
        "gradient_accumulation_steps": Setting(batches.accumulation, batches.origins["gradient_accumulation_steps"]),
        **_schedule(recipe, world),
        **_unknown_rows(recipe),
    }
    return Plan(
        **{name: setting.value for name, setting in settings.items()},
        notes=(*world.notes, *recipe.notes, *_notes(recipe, world, dtype.value), *attention_notes(recipe, config)),
        origins={name: setting.origin for name, setting in settings.items()},
    )


def with_rows(plan: Plan, num_rows: int, validation: float, origin: str) -> Plan:
    """Return the plan for `num_rows` usable rows, of which the fraction `validation` is held out."""
    if validation and num_rows < 2:
        raise Refused(Problem("1 row cannot be split", "Set data.validation: 0", plan.recipe, "data.validation"))
    held_out = count_held_out(num_rows, validation)
    origins = {"num_train_rows": origin, "num_eval_rows": f"data.validation {validation:g} of {num_rows:,}"}
    return with_split(plan, num_rows - held_out, held_out, origins)


def with_split(plan: Plan, num_train_rows: int, num_eval_rows: int, origins: Mapping[str, str]) -> Plan:
    """Return the plan for a known split: steps per epoch are the global batches that the rows fill, the last one maybe
    in part; all steps are the epochs times that, rounded up as the Trainer does.
    """
    whole, rounded = math.ceil(num_train_rows / plan.global_batch_size), "up"
    if plan.dataloader_drop_last:
        whole, rounded = num_train_rows // plan.global_batch_size, "down: dataloader_drop_last"
    steps = max(whole, 1)
    notes = plan.notes
    if 0 < num_train_rows < plan.global_batch_size and not plan.dataloader_drop_last:
        rows = counted(num_train_rows, "training row")
        fills = "does" if num_train_rows == 1 else "do"
        notes += (
            f"{rows} {fills} not fill the global batch of {plan.global_batch_size}: an epoch is one smaller step",
        )
    arithmetic = {"steps_per_epoch": f"{num_train_rows:,} rows / {plan.global_batch_size}, rounded {rounded}"}
    total = plan.max_steps
    if plan.num_train_epochs is not None:
        total = math.ceil(plan.num_train_epochs * steps)
        arithmetic["num_optimizer_steps"] = f"{plan.num_train_epochs:g} epochs x {steps:,} steps"
    return replace(
        plan,
        num_train_rows=num_train_rows,
        num_eval_rows=num_eval_rows,
        steps_per_epoch=steps,
        num_optimizer_steps=total,
        notes=notes,
        origins={**plan.origins, **origins, **arithmetic},
    )


def argument(recipe: Recipe, name: str) -> Setting:
    """Return the value that a TrainingArguments key has in this run: the recipe's, tunebook's or upstream's default."""
    if recipe.arguments.get(name) == AUTO and name in OUR_DEFAULTS:
        return Setting(OUR_DEFAULTS[name], DECIDED_AT_START)
    if name in recipe.arguments:
        return Setting(recipe.arguments[name], said(recipe, f"training.{name}"))
    if name in OUR_DEFAULTS:
        return Setting(OUR_DEFAULTS[name], OURS)
    return Setting(training_keys()[name].default, "default of TrainingArguments")


def said(recipe: Recipe, key: str) -> str:
    """Return who said a key: `recipe`, or `command line` where an override did."""
    return "command line" if key in recipe.overridden else "recipe"


def _compute_dtype(recipe: Recipe, world: World, bf16_supported: bool, problems: list[Problem]) -> Setting:
    dtype, key = recipe.model.dtype, "model.dtype"
    for flag in ("bf16", "fp16"):
        key = f"training.{flag}" if recipe.arguments.get(flag) else key
    if dtype == "auto":
        if world.device_type == "cpu":
            return Setting("float32", "auto: float32 on a CPU")
        if not bf16_supported or recipe.arguments.get("bf16") is False:
            return Setting("float32", "auto: float32 without bfloat16")
        return Setting("bfloat16", "auto: bfloat16 on GPUs that have it")
    if dtype == "float16" and world.device_type == "cpu":
        problems.append(Problem("float16 (fp16) does not train on a CPU", "Set model.dtype: float32", recipe.path, key))
    if dtype == "bfloat16" and world.device_type == "cuda" and not bf16_supported:
        fix = "Set model.dtype: float16, or float32"
        problems.append(Problem("these GPUs have no bfloat16 (bf16)", fix, recipe.path, key))
    return Setting(dtype, said(recipe, key))


def _check_device(recipe: Recipe, world: World, problems: list[Problem]) -> None:
    if world.device_type != "cpu":
        return

    def refuse(key: str, message: str, fix: str) -> None:
        problems.append(Problem(message, fix, recipe.path, key))

    attention = recipe.model.attn_implementation or ""
    if attention.startswith("fl"):
        refuse("model.attn_implementation", f"{attention} needs a GPU, and this run is on a CPU", "Use sdpa or eager")
    if recipe.arguments.get("tf32"):
        refuse("training.tf32", "TF32 is a mode of GPUs, and this run is on a CPU", "Remove it")
    if recipe.arguments.get("ddp_backend") == "nccl":
        refuse("training.ddp_backend", "nccl works between GPUs, and this run is on a CPU", "Remove it; gloo is used")
    optimizer = recipe.arguments.get("optim") or ""
    if optimizer in ("adamw_torch_xla", "adamw_torch_npu_fused"):
        refuse("training.optim", f"{optimizer} needs hardware that is not here", "Use adamw_torch")


def _method(recipe: Recipe) -> str:
    if recipe.lora is None:
        return "full fine-tune"
    if recipe.quantization is None:
        return "LoRA"
    return "QLoRA, 4-bit base" if recipe.quantization.get("load_in_4bit") else "LoRA, 8-bit base"


def _places(recipe: Recipe, run_dir: str | None) -> dict[str, Setting]:
    folder = Path(run_dir).expanduser() if run_dir else Path("runs") / recipe.stem
    return {
        "recipe": Setting(recipe.path, "command line"),
        "run_dir": Setting(str(folder), "--run-dir" if run_dir else "the recipe's file name"),
        "adapter_dir": Setting(str(folder / "adapter"), "run folder"),
    }


def _base(recipe: Recipe, shape: ModelShape | None) -> dict[str, Setting]:
    revision = recipe.model.revision
    trainable, reason = None, "known once the model is loaded"
    if shape and recipe.lora is None:
        trainable, reason = shape.num_parameters, "all of them"
    elif shape and recipe.lora is not None:
        rank = recipe.lora.get("r") or lora_keys()["r"].default
        trainable = count_lora_parameters(shape, recipe.lora, rank)
        reason = f"rank {rank} x (inputs + outputs) of each target" if trainable else reason
    if recipe.model.add_special_tokens:  # their rows are trained as well
        trainable, reason = None, "known once the model is loaded"
    method_origin = "no lora section" if recipe.lora is None else "lora section, no quantization section"
    if recipe.quantization is not None:
        method_origin = "quantization and lora sections"
    return {
        "model": Setting(recipe.model.name_or_path, said(recipe, "model.name_or_path")),
        "model_revision": Setting(revision, said(recipe, "model.revision") if revision else "default branch or folder"),
        "model_parameters": Setting(
            shape.num_parameters if shape else None, shape.source if shape else "known once the model is loaded"
        ),
        "method": Setting(_method(recipe), method_origin),
        "trainable_parameters": Setting(trainable, reason),
    }


def _world(recipe: Recipe, world: World) -> dict[str, Setting]:
    here = world.launcher != "none"
    backend = "one process needs none" if world.backend is None else f"for {world.device_type}"
    if recipe.arguments.get("ddp_backend"):
        backend = said(recipe, "training.ddp_backend")
    return {
        "world_size": Setting(world.num_processes, f"started by {world.launcher}" if here else "--num-processes"),
        "device_type": Setting(world.device_type, "this machine" if here else "assumed; --device says otherwise"),
        "backend": Setting(world.backend, backend),
    }


def _schedule(recipe: Recipe, world: World) -> dict[str, Setting]:
    given = argument(recipe, "learning_rate")
    rate, scaling = scale_learning_rate(recipe, given.value, world.num_processes)
    steps, epochs, optim = (argument(recipe, name) for name in ("max_steps", "num_train_epochs", "optim"))
    limited = steps.value > 0
    length = recipe.data.max_length
    length_origin = said(recipe, "data.max_length") if "max_length" in recipe.data.model_fields_set else OURS
    data_seed = "seed" if recipe.arguments.get("data_seed") is None else argument(recipe, "data_seed").origin
    return {
        "learning_rate": Setting(rate, scaling or given.origin),
        "lr_scheduler_type": argument(recipe, "lr_scheduler_type"),
        "warmup_steps": argument(recipe, "warmup_steps"),
        # TrainingArguments computes this default: the fused AdamW since torch 2.8.
        "optim": Setting(optim.value or "adamw_torch_fused", optim.origin),
        "num_train_epochs": Setting(None, "max_steps decides") if limited else epochs,
        "max_steps": steps if limited else Setting(None, "num_train_epochs decides"),
        "dataloader_drop_last": argument(recipe, "dataloader_drop_last"),
        "max_length": Setting(length, length_origin),
        "activation_checkpointing": argument(recipe, "activation_checkpointing"),
        "seed": argument(recipe, "seed"),
        "data_seed": Setting(recipe.data_seed, data_seed),
    }


def _unknown_rows(recipe: Recipe) -> dict[str, Setting]:
    steps = recipe.arguments.get("max_steps", -1)
    unknown = "known once the data is read; --rows N gives it"
    return {
        "num_train_rows": Setting(None, unknown),
        "num_eval_rows": Setting(None, unknown),
        "steps_per_epoch": Setting(None, "rows / global batch"),
        "num_optimizer_steps": Setting(steps if steps > 0 else None, "max_steps" if steps > 0 else "epochs x steps"),
    }


def _notes(recipe: Recipe, world: World, dtype: str) -> list[str]:
    notes = [SHARDING_NOTE] if world.shards else []
    if dtype == "bfloat16" and world.device_type == "cpu":
        notes.append("bfloat16 computes about 4 times slower than float32 on a CPU: model.dtype: float32")
    return notes + random_notes(recipe)
