"""What transformers says of the schedule of the learning rate, before any weights load."""

from typing import Any

import torch
from transformers import get_scheduler

from tunebook.errors import Problem
from tunebook.plan.plan import Plan
from tunebook.recipe.schema import Recipe


def find_schedule_problems(recipe: Recipe, plan: Plan) -> list[Problem]:
    """Build the schedule of a plan on a single number, and return what is objected to."""
    options: Any = recipe.arguments.get("lr_scheduler_kwargs")
    steps = plan.num_optimizer_steps or 1
    warmup = plan.warmup_steps if plan.warmup_steps >= 1 else -(-plan.warmup_steps * steps // 1)
    try:
        get_scheduler(
            plan.lr_scheduler_type,
            optimizer=torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=plan.learning_rate),
            num_warmup_steps=int(warmup),
            num_training_steps=steps,
            scheduler_specific_kwargs=options,
        )
    except (ValueError, TypeError, ImportError, NotImplementedError, RuntimeError) as error:
        key = "training.lr_scheduler_kwargs" if options else "training.lr_scheduler_type"
        return [Problem(" ".join(str(error).split()), "transformers documents what it takes", key=key)]
    return []
