"""run_summary.json: what a run was and how it ended, on disk from its start."""

import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from tunebook.data.prepare import PreparedData
from tunebook.errors import EXIT_FAILED, EXIT_INTERRUPTED, Interrupted
from tunebook.launching.world import World
from tunebook.model.adapter import public_base
from tunebook.plan.plan import Plan
from tunebook.recipe.schema import Recipe
from tunebook.runs.folder import SUMMARY
from tunebook.system.hardware import name_hardware
from tunebook.system.places import is_local_data
from tunebook.system.writing import write_whole

PACKAGES = ("tunebook", "torch", "transformers", "accelerate", "peft", "bitsandbytes", "datasets")


@dataclass(frozen=True)
class RunSummary:
    """The content of run_summary.json. What is not known yet, or not measured, is None."""

    status: Literal["running", "completed", "interrupted", "failed"]
    recipe: str
    recipe_sha256: str
    program: str
    data_fingerprint: str
    hub_datasets: tuple[str, ...]
    template: str
    stop_token_id: int
    model: str
    model_revision: str | None
    public_base: str | None
    method: str
    compute_dtype: str
    world_size: int
    device: str
    hardware: str
    backend: str | None
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    global_batch_size: int
    learning_rate: float
    seed: int
    num_train_rows: int
    num_eval_rows: int
    num_quarantined_rows: int
    num_truncated_rows: int
    num_dropped_rows: int
    versions: Mapping[str, str]
    exit_code: int | None = None
    error: str | None = None
    went_on_from_step: int | None = None
    num_optimizer_steps: int | None = None
    trained_tokens: int | None = None
    processed_tokens: int | None = None
    padded_tokens: int | None = None
    first_loss: float | None = None
    final_loss: float | None = None
    eval_loss_before: float | None = None
    eval_loss: float | None = None
    eval_token_accuracy: float | None = None
    exact_match_before: float | None = None
    exact_match_after: float | None = None
    num_exact_match_rows: int = 0
    tokens_per_second: float | None = None
    training_seconds: float | None = None
    peak_memory_bytes: int | None = None
    wall_seconds: float | None = None
    adapter_dir: str | None = None
    adapter_sha256: str | None = None
    published: str | None = None
    publish_error: str | None = None


def start_summary(recipe: Recipe, plan: Plan, world: World, data: PreparedData, model: Any) -> RunSummary:
    """Return the summary of a run that begins, with what its recipe, plan, world, data and base say."""
    return RunSummary(
        status="running",
        recipe=recipe.path,
        recipe_sha256=recipe_sha256(recipe),
        program=Path(sys.argv[0]).name,
        data_fingerprint=data.data_fingerprint,
        hub_datasets=tuple(source.path for source in recipe.data.all_sources() if not is_local_data(source.path)),
        template=data.template,
        stop_token_id=data.stop_token_id,
        model=recipe.model.name_or_path,
        model_revision=getattr(model.config, "_commit_hash", None) or recipe.model.revision,
        public_base=public_base(recipe),
        method=plan.method,
        compute_dtype=plan.compute_dtype,
        world_size=world.num_processes,
        device=world.device_type,
        hardware=name_hardware(world.device_type),
        backend=world.backend,
        per_device_train_batch_size=plan.per_device_train_batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        global_batch_size=plan.global_batch_size,
        learning_rate=plan.learning_rate,
        seed=recipe.seed,
        num_train_rows=data.num_train_rows,
        num_eval_rows=data.num_eval_rows,
        num_quarantined_rows=data.num_bad_rows,
        num_truncated_rows=data.num_truncated_rows,
        num_dropped_rows=data.num_dropped_rows,
        versions={"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
    )


def recipe_sha256(recipe: Recipe) -> str:
    """Return a hash of what the recipe says after overrides: comments, key order and the file's place don't matter."""
    return hashlib.sha256(json.dumps(recipe.resolved, sort_keys=True, default=str).encode()).hexdigest()


def write_summary(summary: RunSummary, run_dir: str) -> None:
    """Write run_summary.json, whole or not at all."""
    write_whole(Path(run_dir) / SUMMARY, json.dumps(asdict(summary), indent=2) + "\n")


def failed_summary(summary: RunSummary, error: BaseException) -> RunSummary:
    """Return the summary of a run that ended with `error`, naming the error at the root of it."""
    if isinstance(error, Interrupted):
        return replace(summary, status="interrupted", exit_code=EXIT_INTERRUPTED, error=str(error))
    return replace(summary, status="failed", exit_code=EXIT_FAILED, error=f"{type(error).__name__}: {error}".strip())
