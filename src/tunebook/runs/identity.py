"""What a run's result depends on, field by field, so that going on with another recipe is noticed before it happens."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tunebook.data.cache import file_sha256
from tunebook.errors import Problem
from tunebook.plan.plan import Plan
from tunebook.recipe.rules import FOLLOW_THE_LOSS
from tunebook.recipe.schema import AUTO, DataSection, ModelSection, Recipe
from tunebook.recipe.upstream import lora_keys, quantization_keys, training_keys
from tunebook.system.places import is_local, local_path

Identity = dict[str, Any]

# Keys that change when, where or how fast something is done, and not what comes out. A key that is not here counts.
HARMLESS_TRAINING = frozenset({
    "per_device_eval_batch_size", "activation_checkpointing", "activation_checkpointing_kwargs", "report_to",
    "logging_strategy", "logging_steps", "logging_first_step", "save_strategy", "save_steps", "save_total_limit",
    "eval_strategy", "eval_steps", "eval_delay", "project", "trackio_space_id", "dataloader_num_workers",
    "dataloader_prefetch_factor", "dataloader_persistent_workers", "dataloader_pin_memory", "ddp_timeout",
    "ddp_backend", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_broadcast_buffers",
    "torch_empty_cache_steps", "skip_memory_metrics", "check_replicas", "fused_loss", "save_safetensors", "debug",
})  # fmt: skip
# With the best checkpoint exported, or a rate that follows the held-out loss, the moments of measuring decide, too.
MEASURING = frozenset({"eval_strategy", "eval_steps", "eval_delay", "save_strategy", "save_steps"})
# Said by the plan in another form, which is what counts.
PLANNED_TRAINING = frozenset({
    "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "num_train_epochs", "max_steps",
    "seed", "data_seed", "bf16", "fp16", "warmup_steps",
})  # fmt: skip
# The rows' own hash counts instead of their place; it covers what sources say of them.
HARMLESS_DATA = frozenset({
    "path", "sources", "revision", "answer_rows", "max_bad_fraction", "max_truncated_fraction", "packing",
})  # fmt: skip
HARMLESS_MODEL = frozenset({"name_or_path", "revision", "base_id", "dtype"})  # the base's own identity counts
# Taken over with a word about the schedule: training longer than was planned is a wish, not a mistake.
SCHEDULE = ("training.num_train_epochs", "training.max_steps")
# Drawn anew for each of them where anything random is in the training.
DRAWING = (
    "processes",
    "training.per_device_train_batch_size",
    "training.gradient_accumulation_steps",
    "data.packing",
)


def recipe_identity(recipe: Recipe, plan: Plan) -> Identity:
    """Return every field of recipe and plan that the result depends on, by dotted key, defaults filled in."""
    defaults = {name: key.default for name, key in training_keys().items()}
    left_out = _harmless_training(recipe, plan) | PLANNED_TRAINING
    found: Identity = {
        f"training.{name}": value
        for name, value in recipe.arguments.items()
        if name not in left_out and value != defaults.get(name)
    }
    for name in ("global_batch_size", "learning_rate", "num_train_epochs", "max_steps", "seed", "data_seed"):
        found[f"training.{name}"] = getattr(plan, name)
    found |= {f"training.{name}": getattr(plan, name) for name in ("warmup_steps", "lr_scheduler_type", "optim")}
    found["model.dtype"] = plan.compute_dtype
    found |= _section("model", recipe.model, HARMLESS_MODEL) | _section("data", recipe.data, HARMLESS_DATA)
    for section, written, keys in (
        ("lora", recipe.lora, lora_keys()),
        ("quantization", recipe.quantization, quantization_keys()),
    ):
        found[section] = None if written is None else "given"
        for name, value in (written or {}).items():
            found[f"{section}.{name}"] = value
        for name in () if written is None else keys:
            found.setdefault(f"{section}.{name}", keys[name].default)
    plain: Identity = json.loads(json.dumps(found, default=str))
    return plain


def tokenizer_digest(tokenizer: Any) -> str:
    """Return one hash over a fast tokenizer's own file, its special tokens and its chat template."""
    parts = [tokenizer.backend_tokenizer.to_str(), str(tokenizer.special_tokens_map), str(tokenizer.chat_template)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def folder_digest(name_or_path: str) -> str:
    """Return a hash of a local base: its config and its weight files, wherever it stands."""
    folder = local_path(name_or_path)
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name == "config.json":
            digest.update(path.read_bytes())
        elif path.suffix in (".safetensors", ".bin"):
            digest.update(f"{path.name} {file_sha256(path)}\n".encode())
    return digest.hexdigest()


def base_of(recipe: Recipe, load_commit: Any) -> str:
    """Return what the base is: a local folder's hash, or the Hub name and the commit that `load_commit` finds."""
    name = recipe.model.name_or_path
    if is_local(name):
        return folder_digest(name)
    return f"{name}@{load_commit() or recipe.model.revision or 'main'}"


def find_differences(begun: Identity, now: Identity, run_dir: str) -> list[Problem]:
    """Return a problem for every field whose value is another one now; SCHEDULE aside.

    A section or a content that only one of them knows of is not compared, so that a recipe can be checked before the
    data is read.
    """
    known = {key.partition(".")[0] for key in begun} & {key.partition(".")[0] for key in now}
    # Where a section came or went, each of its keys did.
    known -= {name for name in known if name in begun and begun[name] != now.get(name)}
    problems = []
    for key in sorted(begun.keys() | now.keys()):
        before, after = begun.get(key), now.get(key)
        if before == after or key in SCHEDULE or not (key.partition(".")[0] in known or (key in begun and key in now)):
            continue
        message = f"the unfinished run in {run_dir} began with {_shown(before)}, this one has {_shown(after)}"
        fix = "Restore it to go on, or add --fresh to set that run aside and start over"
        problems.append(Problem(message, fix, key=key))
    return problems


def find_taken_over(begun: Mapping[str, Any], now: Mapping[str, Any], random: Sequence[str]) -> list[str]:
    """Return a note for every setting that differs and is taken over, by dotted key: `key: 8, was 4`.

    None of them changes the result, but where something draws random numbers (`random` names it) some change those.
    """
    drawn = f"from here on {' and '.join(random)} draws other numbers" if random else ""
    return [
        f"{key}: {_shown(now.get(key))}, was {_shown(begun.get(key))}; "
        + (drawn if drawn and key in DRAWING else "it does not change the result")
        for key in sorted(begun.keys() | now.keys())
        if begun.get(key) != now.get(key)
    ]


def taken_over(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """Return the settings that may differ when a run is gone on with, by dotted key."""
    found: dict[str, Any] = {
        "processes": plan.world_size,
        "device": plan.device_type,
        "training.per_device_train_batch_size": plan.per_device_train_batch_size,
        "training.gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "training.activation_checkpointing": plan.activation_checkpointing,
        "model.name_or_path": recipe.model.name_or_path,
        "data.path": ", ".join(source.path for source in recipe.data.all_sources()),
        "data.packing": recipe.data.packing,
    }
    harmless = _harmless_training(recipe, plan)
    for name, value in recipe.arguments.items():
        if name in harmless:
            found[f"training.{name}"] = value
    if recipe.chooses_micro_batch:  # what is chosen may be another each time
        found |= dict.fromkeys(("training.per_device_train_batch_size", "training.gradient_accumulation_steps"), AUTO)
    plain: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return plain


def _harmless_training(recipe: Recipe, plan: Plan) -> frozenset[str]:
    measuring_decides = recipe.arguments.get("load_best_model_at_end") or plan.lr_scheduler_type in FOLLOW_THE_LOSS
    return HARMLESS_TRAINING - (MEASURING if measuring_decides else frozenset())


def _section(name: str, section: ModelSection | DataSection, left_out: frozenset[str]) -> Identity:
    return {f"{name}.{key}": value for key, value in section.model_dump().items() if key not in left_out}


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value).removesuffix(".0")
    return f"{text[:12]}..." if len(text) == 64 and set(text) <= set("0123456789abcdef") else text
