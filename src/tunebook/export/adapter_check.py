"""What a run left at its end, held against what it trained before anything is made of it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunebook.errors import Problem, Refused
from tunebook.model.mutated_start import changes_base
from tunebook.recipe.schema import Recipe
from tunebook.system.quiet import quiet_libraries

WEIGHTS = "adapter_model.safetensors"
# Written by every run beside its weights; transformers and peft fall back to something else where one is missing.
BESIDE = ("generation_config.json", "tokenizer_config.json", "tokenizer.json")
# How the tensors of a LoRA adapter are computed with: they alone do not tell.
SCALING = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
FIX = "Take the run from where it is whole, name one of its checkpoints, or train it again"


def check_adapter(folder: Path, recipe: Recipe, sha256: str | None) -> None:
    """Read all that came out of a run; raise Refused where it is not what was trained.

    `sha256` is that of the trained tensors (`adapter.tensor_sha256`), None where it is not known.
    """
    settings = "config.json" if recipe.lora is None else "adapter_config.json"
    reason = find_damage(folder, settings)
    if not reason and recipe.lora is not None:
        reason = _find_other_scaling(folder / settings, recipe.lora)
    if not reason and sha256 is not None:
        reason = _find_other_tensors(folder, recipe, sha256)
    if reason:
        raise Refused(Problem(f"is not what was trained: {reason}", FIX, str(folder)))


def find_damage(folder: Path, settings: str) -> str:
    """Return which file of JSON is missing or cannot be read, "" where all are whole; `settings` is one needed."""
    for name in (settings, *BESIDE):
        if not (folder / name).is_file():
            return f"{name} is missing"
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return f"{path.name} cannot be read"
        if path.name in (settings, *BESIDE) and not isinstance(content, dict):
            return f"{path.name} cannot be read"
    return ""


def _find_other_scaling(settings: Path, lora: Mapping[str, Any]) -> str:
    if changes_base(lora):
        return ""  # saved as another kind than it was trained
    written, given = json.loads(settings.read_text(encoding="utf-8")), json.loads(json.dumps(dict(lora), default=str))
    for name in SCALING:
        if name in given and written.get(name) != given[name]:
            return f"{settings.name} has {name} {written.get(name)}, and the recipe {given[name]}"
    return ""


def _find_other_tensors(folder: Path, recipe: Recipe, sha256: str) -> str:
    from safetensors import SafetensorError

    from tunebook.model.adapter import tensor_sha256

    try:
        with quiet_libraries():
            tensors = _read_model(folder) if recipe.lora is None else _read_tensors(folder / WEIGHTS)
    except FileNotFoundError:
        return f"{WEIGHTS} is missing" if recipe.lora is not None else "weights are missing"
    except (OSError, SafetensorError, RuntimeError, ValueError, LookupError, TypeError) as error:
        return f"its weights cannot be read ({' '.join(str(error).split())[:120].rstrip('.')})"
    found = tensor_sha256(tensors)
    return "" if found == sha256 else f"its tensors have the sha256 {found[:12]}, and the trained ones {sha256[:12]}"


def _read_tensors(path: Path) -> Mapping[str, Any]:
    from safetensors.torch import load_file

    tensors: Mapping[str, Any] = load_file(path)
    return tensors


def _read_model(folder: Path) -> Mapping[str, Any]:
    """Return the weights of a whole model under the names that it has in memory: files leave out what is tied."""
    from transformers import AutoModelForCausalLM

    model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    if unknown := sorted(loading["unexpected_keys"]):
        raise ValueError(f"{unknown[0]} is no weight of it")
    tensors: Mapping[str, Any] = model.state_dict()
    return tensors
