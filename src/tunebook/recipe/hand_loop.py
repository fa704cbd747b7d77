"""What a recipe may ask of the loop in train_ddp.py, which does less than Trainer: anything else is refused by name."""

import os
from collections.abc import Mapping
from typing import Any, Final

from tunebook.errors import Problem, Refused
from tunebook.recipe.defaults import OUR_DEFAULTS
from tunebook.recipe.rules import FOLLOW_THE_LOSS, OWN_TRACKERS
from tunebook.recipe.schema import Recipe
from tunebook.recipe.upstream import training_keys

# TrainingArguments that the loop follows.
FOLLOWED: Final = frozenset(
    {
        "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "learning_rate",
        "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "num_train_epochs", "max_steps",
        "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "seed", "data_seed", "bf16", "fp16",
        "tf32", "logging_steps", "logging_strategy", "logging_first_step", "eval_strategy", "eval_steps",
        "eval_delay",
        "activation_checkpointing", "activation_checkpointing_kwargs", "dataloader_drop_last", "dataloader_num_workers",
        "dataloader_pin_memory", "ddp_backend", "ddp_timeout", "ddp_find_unused_parameters", "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers", "project",
    }
)  # fmt: skip
# About checkpoints, of which the loop writes none: nothing that they say changes the adapter.
WITHOUT_EFFECT: Final = frozenset({"save_strategy", "save_steps", "save_total_limit"})
# Values that a followed key may not have here, and what is there instead.
NOT_FOLLOWED: Final[Mapping[str, tuple[str, ...]]] = {
    "lr_scheduler_type": FOLLOW_THE_LOSS,
    "save_strategy": ("best",),
}
OPTIMIZERS: Final = ("adamw_torch", "adamw_torch_fused")
FIX: Final = "Remove it, or train with finetune.py"


def check_hand_loop(recipe: Recipe) -> None:
    """Raise Refused, naming every key, where a recipe asks for what the loop of train_ddp.py does not do."""
    problems = [
        Problem(f"train_ddp.py does not do {_shown(value)}", FIX, recipe.path, f"training.{name}")
        for name, value in recipe.arguments.items()
        if not _is_done(name, value)
    ]
    if recipe.model.dtype == "float16" or recipe.arguments.get("fp16"):
        fix = "Set model.dtype: bfloat16 or float32, or train with finetune.py"
        key = "model.dtype" if recipe.model.dtype == "float16" else "training.fp16"
        problems.append(Problem("float16 needs a scaled loss, which train_ddp.py does not have", fix, recipe.path, key))
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        fix = "Start it with accelerate_configs/ddp.yaml, or train with finetune.py"
        problems.append(Problem("train_ddp.py shards nothing: it is DDP by hand", fix, "ACCELERATE_USE_FSDP"))
    if recipe.hub is not None:
        fix = "Add hub=null, and publish the finished run with `tunebook push`"
        problems.append(Problem("train_ddp.py publishes nothing", fix, recipe.path, "hub.repo"))
    if problems:
        raise Refused(problems)


def _is_done(name: str, value: Any) -> bool:
    if name == "report_to":
        return set([value] if isinstance(value, str) else value or ()) <= {*OWN_TRACKERS, "none"}
    if name == "optim":
        return value in OPTIMIZERS
    if value in NOT_FOLLOWED.get(name, ()):
        return False
    ours = OUR_DEFAULTS.get(name, training_keys()[name].default)
    return name in FOLLOWED | WITHOUT_EFFECT or value is None or value == ours


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
