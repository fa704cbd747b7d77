"""Whether the names in a recipe's `lora:` section exist in the model, told before any weights load.

peft adapts what it finds and is silent about the rest, so one mistyped name trains only part of the model.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tunebook.errors import Problem
from tunebook.system.spelling import near_words

ALL_LINEAR = "all-linear"


def check_lora_names(model: Any, lora: Mapping[str, Any], where: str) -> list[Problem]:
    """Return a problem for each name in `lora` that matches nothing in `model` (which may be on the meta device)."""
    modules = [name for name, _ in model.named_modules() if name]
    parameters = [name for name, _ in model.named_parameters()]
    ranked = [*modules, *(parameters if lora.get("target_parameters") else ())]
    problems = [
        *_unmatched_modules("target_modules", lora.get("target_modules"), modules, model),
        *_blocks(lora.get("target_modules"), model),
        *_unmatched_modules("exclude_modules", lora.get("exclude_modules"), modules, model),
        *_unmatched_modules("modules_to_save", lora.get("modules_to_save"), modules, model),
        *_unmatched_modules("target_parameters", lora.get("target_parameters"), parameters, model),
        *_unmatched_patterns("rank_pattern", lora.get("rank_pattern"), ranked, model),
        *_unmatched_patterns("alpha_pattern", lora.get("alpha_pattern"), ranked, model),
        *_missing_layers(lora, modules),
        *_missing_tokens(lora.get("trainable_token_indices"), model),
    ]
    return [Problem(problem.message, problem.fix, where, f"lora.{problem.key}") for problem in problems]


def chosen_targets(lora: Mapping[str, Any]) -> Any:
    """Return what `target_modules` means: all linear layers where nothing is said, None where parameters alone are."""
    targets = lora.get("target_modules")
    parameters_alone = targets is None and "target_modules" in lora and lora.get("target_parameters")
    return ALL_LINEAR if targets is None and not parameters_alone else targets


def takes_all_linear(lora: Mapping[str, Any]) -> bool:
    """Whether the targets are all linear layers, and no names."""
    targets = chosen_targets(lora)
    return isinstance(targets, str) and targets.lower() == ALL_LINEAR


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


def _missing_layers(lora: Mapping[str, Any], modules: Sequence[str]) -> list[Problem]:
    layers, given = lora.get("layers_to_transform"), lora.get("layers_pattern")
    if layers is None:
        return []
    wanted = [layers] if isinstance(layers, int) else list(layers)
    numbers = {number for name in modules if (number := layer_number(name)) is not None}
    if given:
        patterns = [given] if isinstance(given, str) else list(given)
        lists = sorted({name.split(".")[-2] for name in modules if name.split(".")[-1].isdigit()})
        listed = f"Layers are numbered under {', '.join(lists)}; remove it where one of these is meant"
        numbers = set()
        for pattern in patterns:
            found = {number for name in modules if (number := layer_number(name, pattern)) is not None}
            numbers |= found
            if not found:
                return [Problem(f"{pattern} matches no list of layers of this model", listed, key="layers_pattern")]
    missing = [layer for layer in wanted if layer not in numbers]
    message = f"this model has no layer {', '.join(map(str, missing))}"
    return [Problem(message, f"Layers are numbered 0 to {max(numbers)}", key="layers_to_transform")] if missing else []


def layer_number(name: str, pattern: str = r"[^.]*") -> int | None:
    """Return the number of the layer that a module stands in, under a list of that name; None for one in no layer."""
    found = re.match(rf"(?:^|.*?\.)(?:{pattern})\.(\d+)(?:\.|$)", name)
    return None if found is None else int(found.group(1))


def _missing_tokens(tokens: Any, model: Any) -> list[Problem]:
    key, embedding, head = "trainable_token_indices", model.get_input_embeddings(), model.get_output_embeddings()
    names = {name: module for name, module in model.named_modules() if module in (embedding, head)}
    problems = []
    for given, listed in (tokens if isinstance(tokens, Mapping) else {"": tokens or []}).items():
        layers = [module for name, module in names.items() if name == given or name.endswith(f".{given}")]
        if given and not layers:
            fix = f"Rows are those of {', '.join(sorted(name.rpartition('.')[2] for name in names))}"
            problems.append(Problem(f"{given} is no embedding and no output head", fix, key=key))
            continue
        num_rows = min(len(module.weight) for module in layers or [embedding])
        missing = ", ".join(str(token) for token in listed if not 0 <= token < num_rows)
        message = f"the embedding of this model has no row {missing}"
        problems += [Problem(message, f"Rows are numbered 0 to {num_rows - 1}", key=key)] if missing else []
    return problems


def _near(name: str, existing: Sequence[str]) -> str:
    last_parts = sorted({other.rpartition(".")[2] for other in existing})
    near = near_words(name.rpartition(".")[2], last_parts, n=3)
    return f"Nearest: {', '.join(near)}. " if near else ""


def _names(model: Any) -> str:
    return f"Linear layers of this model: {', '.join(linear_names(model))}"
