"""Which TrainingArguments tunebook sets by itself, readable without importing torch.

Everything else that a recipe leaves out keeps the default of TrainingArguments.
"""

from collections.abc import Mapping
from typing import Any, Final

# What a recipe may change.
OUR_DEFAULTS: Final[Mapping[str, Any]] = {
    # Activations of a layer are computed again in the backward pass: a third more compute for a fraction of the memory.
    "activation_checkpointing": True,
    # Only trained parameters are reduced and all of them take part in each step; upstream's default walks the graph.
    "ddp_find_unused_parameters": False,
    # Once per epoch where data.validation holds rows out, else never.
    "eval_strategy": "epoch",
    "logging_steps": 10,
    "logging_first_step": True,
    "report_to": "none",
}

# What a recipe cannot change, because a promise depends on it.
FIXED_ARGUMENTS: Final[Mapping[str, Any]] = {
    "average_tokens_across_devices": True,
    "train_sampling_strategy": "batch_rebalance",
    # True would synchronise the host at every micro-batch and hide a NaN behind the average of earlier losses.
    "logging_nan_inf_filter": False,
    "prediction_loss_only": True,
    "remove_unused_columns": False,
    "use_cache": False,
    "disable_tqdm": True,
    "log_on_each_node": False,
    "save_on_each_node": False,
}

# Always part of activation_checkpointing_kwargs unless the recipe says otherwise: under DDP the reentrant form marks a
# LoRA parameter ready twice and stops at the first backward.
CHECKPOINTING_KWARGS: Final[Mapping[str, Any]] = {"use_reentrant": False}
