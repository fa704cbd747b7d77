"""Whether the names in a recipe's `lora:` section exist in the model, told before any weights load.

peft adapts what it finds and is silent about the rest, so one mistyped name trains only part of the model.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tunebook.errors import Problem

ALL_LINEAR = "all-linear"


def check_lora_names(model: Any, lora: Mapping[str, Any], where: str) -> list[Problem]:
    """Return a problem for each name in `lora` that matches nothing in `model` (which may be on the meta device)."""
    modules = [name for name, _ in model.named_modules() if name]
    parameters = [name for name, _ in model.named_parameters()]
    problems = [
        *_unmatched_modules("target_modules", lora.get("target_modules"), modules, model),
        *_blocks(lora.get("target_modules"), model),
        *_unmatched_modules("exclude_modules", lora.get("exclude_modules"), modules, model),
        *_unmatched_modules("modules_to_save", lora.get("modules_to_save"), modules, model),
        *_unmatched_modules("target_parameters", lora.get("target_parameters"), parameters, model),
        *_unmatched_patterns("rank_pattern", lora.get("rank_pattern"), modules, model),
        *_unmatched_patterns("alpha_pattern", lora.get("alpha_pattern"), modules, model),
        *_missing_layers(lora.get("layers_to_transform"), modules),
        *_missing_tokens(lora.get("trainable_token_indices"), model),
    ]
    return [Problem(problem.message, problem.fix, where, f"lora.{problem.key}") for problem in problems]


def linear_names(model: Any) -> list[str]:
    """Return the last part of the name of every linear layer but the output head, sorted, each once."""
    import torch

    head = model.get_output_embeddings()
    linear = {
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and module is not head
    }
    return sorted({name.rpartition(".")[2] for name in linear})


def short_names(model: Any, full_names: Iterable[str]) -> list[str]:
    """Return the shortest sorted names that match exactly `full_names` among the modules of `model`.

    That is the last parts where they match nothing else, as `q_proj` does in most models, else the full names. `model`
    is the base without LoRA layers, or with them, which are then not counted.
    """
    wanted = set(full_names)
    last_parts = {name.rpartition(".")[2] for name in wanted}
    matched = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in last_parts}
    return sorted(last_parts if matched == wanted else wanted)


def _unmatched_modules(key: str, names: Any, existing: Sequence[str], model: Any) -> list[Problem]:
    if names is None or (key == "target_modules" and isinstance(names, str) and names.lower() == ALL_LINEAR):
        return []
    if isinstance(names, str):
        matched = any(re.fullmatch(names, name) for name in existing)
        hint = "A text is a pattern for the whole path of a module; write a list for plain names. "
        return [] if matched else [Problem(f"{names} matches no module of this model", hint + _names(model), key=key)]
    return [
        Problem(
            f"{name} matches no {'parameter' if key == 'target_parameters' else 'module'} of this model", fix, key=key
        )
        for name in names
        if not any(other == name or other.endswith(f".{name}") for other in existing)
        for fix in [_near(name, existing) + _names(model)]
    ]


def _blocks(names: Any, model: Any) -> list[Problem]:
    """Return a problem for each listed target that is a block with layers inside, which LoRA cannot adapt as one."""
    blocks = [name for name, module in model.named_modules() if any(True for _ in module.children())]
    return [
        Problem(f"{name} is a block of layers, not a layer", _names(model), key="target_modules")
        for name in (names if isinstance(names, list | tuple | set) else ())
        if any(block == name or block.endswith(f".{name}") for block in blocks)
    ]


def _unmatched_patterns(
    key: str, patterns: Mapping[str, Any] | None, existing: Sequence[str], model: Any
) -> list[Problem]:
    return [
        Problem(f"{pattern} matches no module of this model", _near(pattern, existing) + _names(model), key=key)
        for pattern in patterns or {}
        if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in existing)
    ]


def _missing_layers(layers: Any, modules: Sequence[str]) -> list[Problem]:
    if layers is None:
        return []
    numbers = {int(found.group(1)) for name in modules if (found := re.search(r"\.(\d+)(?:\.|$)", name))}
    wanted = [layers] if isinstance(layers, int) else list(layers)
    missing = [layer for layer in wanted if layer not in numbers]
    message = f"this model has no layer {', '.join(map(str, missing))}"
    return [Problem(message, f"Layers are numbered 0 to {max(numbers)}", key="layers_to_transform")] if missing else []


def _missing_tokens(tokens: Any, model: Any) -> list[Problem]:
    num_rows = model.get_input_embeddings().weight.shape[0]
    lists = list(tokens.values()) if isinstance(tokens, Mapping) else [tokens or []]
    missing = [token for listed in lists for token in listed if not 0 <= token < num_rows]
    message = f"the embedding of this model has no row {', '.join(map(str, missing))}"
    return (
        [Problem(message, f"Rows are numbered 0 to {num_rows - 1}", key="trainable_token_indices")] if missing else []
    )


def _near(name: str, existing: Sequence[str]) -> str:
    last_parts = sorted({other.rpartition(".")[2] for other in existing})
    near = difflib.get_close_matches(name.rpartition(".")[2], last_parts)
    return f"Nearest: {', '.join(near)}. " if near else ""


def _names(model: Any) -> str:
    return f"Linear layers of this model: {', '.join(linear_names(model))}"
