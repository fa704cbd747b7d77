"""How long a run takes: from a measured time of one step, or from the rate of a GPU."""

import json
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from tunebook.errors import Problem, Refused
from tunebook.model.shapes import ModelShape
from tunebook.plan.layer_memory import count_linear_parameters, query_width
from tunebook.plan.plan import Plan
from tunebook.runs.folder import read_summary

# The share of a GPU's rate that fine-tuning reaches; 0.3 to 0.5 is what public training runs report. Not measured here.
UTILISATION = 0.4
# What may stand in any GPU's own name.
MAKERS = {"nvidia", "geforce", "rtx", "tesla"}


@dataclass(frozen=True)
class Gpu:
    """A GPU as asked about: its memory, and where the name says it the rate of 16-bit products and the types it has."""

    memory_gib: float
    tflops: float | None = None
    bfloat16: bool = True


@dataclass(frozen=True)
class Duration:
    """Seconds of one optimizer step and where they come from; hours without evaluation, loading and saving."""

    step_seconds: float
    source: str
    steps_per_epoch: int | None
    epoch_hours: float | None
    hours: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for --json."""
        return asdict(self)


def read_gpu(text: str) -> Gpu:
    """Return the GPU of `--gpu`: a number of GiB, or a name of facts/gpus.json. Raises Refused for anything else."""
    known = _read_facts()
    name = text.strip().lower()
    if name in known:
        return Gpu(**{key: known[name][key] for key in ("memory_gib", "tflops", "bfloat16") if key in known[name]})
    try:
        memory = float(name.removesuffix("gib").removesuffix("gb"))
    except ValueError:
        memory = -1.0
    if not 0 < memory < 1e6:  # nan is neither
        message = f"--gpu got {text!r}, expected GiB of memory or a name"
        raise Refused(Problem(message, f"Known: {', '.join(known)}", "command line"))
    return Gpu(memory)


def find_gpu(own_name: str) -> str | None:
    """Return which GPU of facts/gpus.json one is by the name it has of itself, or None where that is not certain."""
    words = set(own_name.lower().replace("-", " ").split()) - MAKERS
    for name, facts in _read_facts().items():
        named = set(facts["named"])
        if named <= words <= named | set(facts.get("beside", ())):
            return name
    return None


def _read_facts() -> dict[str, dict[str, Any]]:
    facts: dict[str, dict[str, Any]] = json.loads(
        files("tunebook").joinpath("facts/gpus.json").read_text(encoding="utf-8")
    )["gpus"]
    return facts


def plan_duration(plan: Plan, step_seconds: float, source: str) -> Duration:
    """Return the hours of an epoch and of the whole run at `step_seconds` per optimizer step."""
    epoch = None if plan.steps_per_epoch is None else plan.steps_per_epoch * step_seconds / 3600
    whole = None if plan.num_optimizer_steps is None else plan.num_optimizer_steps * step_seconds / 3600
    return Duration(step_seconds, source, plan.steps_per_epoch, epoch, whole)


def read_step_seconds(run_dir: str, recipe_sha256: str, plan: Plan) -> float | None:
    """Return the seconds per step of a completed run of this recipe in `run_dir`, in the plan's world, or None.

    One that went on from a checkpoint counts all its seconds, and may have been another world's before: None.
    """
    summary = read_summary(Path(run_dir)) or {}
    try:
        seconds, steps = float(summary["training_seconds"]), int(summary["num_optimizer_steps"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    same = (summary.get("status"), summary.get("recipe_sha256")) == ("completed", recipe_sha256)
    same &= (summary.get("world_size"), summary.get("device")) == (plan.world_size, plan.device_type)
    same &= summary.get("went_on_from_step") is None
    return seconds / steps if same and steps > 0 and seconds > 0 else None


def step_seconds_of(shape: ModelShape, plan: Plan, tokens_per_step: float, length: float, gpu: Gpu) -> float | None:
    """Return the seconds of one step at UTILISATION of the GPU's rate, or None where the rate is not known.

    `tokens_per_step` are those of all processes, padding included.
    """
    if gpu.tflops is None:
        return None
    trains_all = plan.trainable_parameters == shape.num_parameters
    operations = operations_per_token(shape, length, plan.activation_checkpointing, trains_all)
    return tokens_per_step * operations / (plan.world_size * gpu.tflops * 1e12 * UTILISATION)


def operations_per_token(shape: ModelShape, length: float, checkpointing: bool, trains_all: bool = False) -> float:
    """Return the floating-point operations that training takes for a token of a row of `length` tokens.

    2 for each weight in a forward, 2 more for the gradient that passes through, 2 more for the gradient of the weight
    itself where it is trained, and another forward under activation checkpointing; attention adds 4 x length x query
    width per layer and forward, half of it masked (Kaplan et al. 2020, section 2.1).
    """
    weights = count_linear_parameters(shape) + shape.vocab_size * shape.hidden_size
    attention = 2 * length * query_width(shape) * shape.num_layers
    passes = 2 + (1 if checkpointing else 0)
    return 2 * weights * (passes + trains_all) + attention * (passes + 1)
