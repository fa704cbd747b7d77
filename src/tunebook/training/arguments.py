"""TrainingArguments from recipe, plan and world."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import Trainer, TrainingArguments
from transformers.integrations import get_available_reporting_integrations

from tunebook.errors import Problem, Refused
from tunebook.launching.world import World
from tunebook.plan.plan import Plan
from tunebook.recipe.defaults import CHECKPOINTING_KWARGS, FIXED_ARGUMENTS, OUR_DEFAULTS
from tunebook.recipe.rules import OWN_TRACKERS
from tunebook.recipe.schema import Recipe

# Optimizers that are made from the model's own layers.
NEED_THE_MODEL = ("galore", "apollo", "lomo", "adalomo")


def build_training_arguments(recipe: Recipe, plan: Plan, world: World) -> TrainingArguments:
    """Return what the recipe wrote, over our defaults, under what the plan derived.

    accelerate's state must exist: it is reused, not made again. Raises Refused with TrainingArguments' own reason where
    it rejects a value.
    """
    assert PartialState._shared_state, "the process group, or the state of a single process, comes first"
    values = {**OUR_DEFAULTS, **recipe.arguments, **FIXED_ARGUMENTS, **_planned(recipe, plan, world)}
    values |= _strategies(recipe, values)
    values["report_to"] = _callbacks(values["report_to"])
    if values.get("save_strategy") == "best":
        values.setdefault("metric_for_best_model", "loss")
    if plan.num_train_epochs is not None:
        values["num_train_epochs"] = plan.num_train_epochs
    # In the same memory as training: without gradients the same rows need less.
    values.setdefault("per_device_eval_batch_size", plan.per_device_train_batch_size)
    try:
        return TrainingArguments(**values)
    except (ValueError, ImportError, TypeError, NotImplementedError) as error:
        raise Refused(Problem(" ".join(str(error).split()), where=recipe.path, key="training")) from error


def check_optimizer(arguments: TrainingArguments) -> None:
    """Look the optimizer up, to hear objections before any weights load. Raises Refused with them."""
    key = "training.optim_args" if arguments.optim_args else "training.optim"
    try:
        if not str(arguments.optim.value).startswith(NEED_THE_MODEL):
            Trainer.get_optimizer_cls_and_kwargs(arguments)
    except (ValueError, TypeError, ImportError, NotImplementedError, RuntimeError) as error:
        raise Refused(Problem(" ".join(str(error).split()), "transformers documents what it takes", key=key)) from error


def _callbacks(wanted: str | list[str] | None) -> str | list[str]:
    """Return what transformers' own callbacks report to: `training.trackers` does it for TensorBoard and trackio."""
    names = [wanted] if isinstance(wanted, str) else wanted or []
    if "all" in names:
        names = get_available_reporting_integrations()
    return [name for name in names if name not in OWN_TRACKERS] or "none"


def _strategies(recipe: Recipe, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return when to evaluate and save, where that follows from something else the recipe says."""
    evaluate = values["eval_strategy"]
    if recipe.data.validation == 0:
        evaluate = "no"
    elif "eval_steps" in recipe.arguments and "eval_strategy" not in recipe.arguments:
        evaluate = "steps"
    # The best model can be kept only if it is saved whenever it is measured.
    follows = values.get("load_best_model_at_end") and "save_strategy" not in recipe.arguments
    return {"eval_strategy": evaluate, **({"save_strategy": evaluate} if follows else {})}


def _planned(recipe: Recipe, plan: Plan, world: World) -> dict[str, Any]:
    given = recipe.arguments.get("activation_checkpointing_kwargs") or {}
    return {
        "output_dir": str(Path(plan.run_dir) / "checkpoints"),
        "run_name": recipe.stem,
        "per_device_train_batch_size": plan.per_device_train_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "activation_checkpointing": plan.activation_checkpointing,
        "learning_rate": plan.learning_rate,
        "seed": recipe.seed,
        "data_seed": recipe.data_seed,
        "bf16": plan.compute_dtype == "bfloat16",
        "fp16": plan.compute_dtype == "float16",
        "use_cpu": world.device_type == "cpu",
        "accelerator_config": {"use_configured_state": True},
        "activation_checkpointing_kwargs": {**CHECKPOINTING_KWARGS, **given},
    }
