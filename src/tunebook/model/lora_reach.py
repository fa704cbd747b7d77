"""Whether the keys of a `lora:` section leave each other something to do on a model, told before any weights load.

Each key alone can be right and still have no effect beside another one: peft says nothing of a target that is excluded
as well, of a rank for a layer that is no target, or of a matrix that two modules share.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from tunebook.errors import Problem
from tunebook.model.lora_targets import chosen_targets, layer_number, takes_all_linear
from tunebook.model.mutated_start import changes_base
from tunebook.recipe.upstream import lora_keys

# These start from the singular vectors of a matrix, which has no more of them than rows or columns.
FROM_VECTORS = ("pissa", "olora", "mica")
# With these keys alone every target gets LoRA.
APART = {"r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "bias", "use_dora", "lora_bias"}


def check_lora_reach(model: Any, lora: Mapping[str, Any], where: str, adds_tokens: bool = False) -> list[Problem]:
    """Return a problem for each key of `lora` that others leave without effect, or that fits no saved adapter.

    `model` may be on the meta device, and all names exist in it. `adds_tokens`: new tokens get rows of their own.
    """
    problems = [
        *_double_saves(model, lora),
        *_shared_rows(model, lora, adds_tokens),
        *_rows_of_targets(model, lora, adds_tokens),
    ]
    if set(lora) - APART and not problems:
        adapted = adapted_modules(model, lora)
        problems += [
            *_unreached_names(model, lora, adapted),
            *_unreached_layers(lora, adapted),
            *_parameters_apart(model, lora),
            *_unused_patterns(model, lora, adapted),
            *_shared_starts(model, lora, adapted),
            *_large_ranks(model, lora, adapted),
        ]
    return [Problem(problem.message, problem.fix, where, f"lora.{problem.key}") for problem in problems]


def adapted_modules(model: Any, lora: Mapping[str, Any]) -> list[str]:
    """Return the names of the modules that peft puts LoRA on, in the model's order, by peft's own rule."""
    from peft.tuners.tuners_utils import check_target_module_exists

    targets = chosen_targets(lora)
    if takes_all_linear(lora):
        targets = _linear_modules(model)
    asked = ("exclude_modules", "modules_to_save", "target_parameters", "layers_to_transform", "layers_pattern")
    config = SimpleNamespace(target_modules=targets, **{name: lora.get(name) for name in asked})
    return [name for name, _ in model.named_modules() if name and check_target_module_exists(config, name)]


def whole_modules(model: Any, lora: Mapping[str, Any]) -> dict[int, str]:
    """Return the names in `modules_to_save` by the ids of all modules that they have trained whole, parts included."""
    saved = lora.get("modules_to_save") or []
    return {
        id(part): name
        for name in saved
        for full_name, module in model.named_modules()
        if full_name == name or full_name.endswith(f".{name}")
        for part in module.modules()
    }


def is_tied(model: Any) -> bool:
    """Whether the output head is the embedding."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return head is not None and bool(
        head.weight is embedding.weight or model.config.get_text_config().tie_word_embeddings
    )


def _linear_modules(model: Any) -> list[str]:
    """Return what peft takes for all linear layers: all but the output head."""
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return [
        name for name, module in model.named_modules() if isinstance(module, Linear | Conv1D) and module is not head
    ]


def _double_saves(model: Any, lora: Mapping[str, Any]) -> Iterator[Problem]:
    """Name what peft would save as well: it compares ends of names, so that `norm` means `input_layernorm`, too."""
    saved = lora.get("modules_to_save") or []
    for name in saved:
        meant = {full for full, _ in model.named_modules() if full == name or full.endswith(f".{name}")}
        taken = {full for full, _ in model.named_modules() if full.endswith(name)}
        others = {other.rpartition(".")[2] for other in taken - meant} - set(saved)
        if others:
            message = f"{name} takes {', '.join(sorted(others))} as well, whose names end so"
            yield Problem(message, f"Name it in full, such as {min(meant)}, or list all of them", key="modules_to_save")


def _shared_rows(model: Any, lora: Mapping[str, Any], adds_tokens: bool) -> Iterator[Problem]:
    """Refuse rows of a matrix of which one user is trained whole: peft would part it, and train neither's rows."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    whole, names = whole_modules(model, lora), {id(module): name for name, module in model.named_modules()}
    listed = _listed_rows(model, lora)
    twice = sorted({whole[id(module)] for module in listed if id(module) in whole})
    if is_tied(model) and (adds_tokens or any(module in (embedding, head) for module in listed)):
        saved = [module for module in (embedding, head) if id(module) in whole]
        if len(saved) == 1:
            both = ", ".join(names[id(module)].rpartition(".")[2] for module in (embedding, head))
            what = "new tokens" if adds_tokens else "trainable_token_indices"
            message = f"{whole[id(saved[0])]} shares its matrix with another layer, and the rows of {what} need both"
            fix = f"Name both, [{both}], or none of them" if adds_tokens else "Remove it, or trainable_token_indices"
            yield Problem(message, fix, key="modules_to_save")
            return
    if twice:
        message = f"rows of {', '.join(twice)}, which modules_to_save trains whole"
        yield Problem(message, "Remove one of the two", key="trainable_token_indices")


def _listed_rows(model: Any, lora: Mapping[str, Any]) -> list[Any]:
    """Return the modules that trainable_token_indices names, the embedding where it is a list."""
    given = lora.get("trainable_token_indices")
    if not isinstance(given, Mapping):
        return [model.get_input_embeddings()] if given else []
    return [module for name, module in model.named_modules() if any(_is_named(name, key) for key in given)]


def _rows_of_targets(model: Any, lora: Mapping[str, Any], adds_tokens: bool) -> Iterator[Problem]:
    """Refuse LoRA on a layer whose rows are trained by themselves, which peft cannot do both."""
    targets = lora.get("target_modules")
    rows = _listed_rows(model, lora)
    if adds_tokens:
        rows += [model.get_input_embeddings(), *([] if is_tied(model) else [model.get_output_embeddings()])]
    for name, module in model.named_modules():
        is_target = (
            bool(re.fullmatch(targets, name))
            if isinstance(targets, str)
            else any(_is_named(name, target) for target in targets or [])
        )
        if is_target and any(module is other for other in rows) and id(module) not in whole_modules(model, lora):
            what = "new tokens (model.add_special_tokens)" if adds_tokens else "trainable_token_indices"
            message = f"{name.rpartition('.')[2]} cannot have LoRA: the rows of {what} in it are trained by themselves"
            yield Problem(message, "Take it out, or into modules_to_save", key="target_modules")


def _unreached_names(model: Any, lora: Mapping[str, Any], adapted: list[str]) -> Iterator[Problem]:
    """Name each target in a list that gets no LoRA at all, under the key that takes it away."""
    targets = lora.get("target_modules")
    taken = set(adapted)
    without = {key: value for key, value in lora.items() if key not in ("exclude_modules", "modules_to_save")}
    in_layers = set(adapted_modules(model, without))
    unsaved = set(adapted_modules(model, {key: value for key, value in lora.items() if key != "modules_to_save"}))
    for target in sorted(targets) if isinstance(targets, list | tuple | set) else []:
        meant = {name for name, _ in model.named_modules() if _is_named(name, target)}
        if meant & taken:
            continue
        if not meant & in_layers:
            key, message = "layers_to_transform", f"{target}, a target, stands in none of these layers"
        elif not meant & unsaved:
            key, message = "exclude_modules", f"{target} is in target_modules, and would get no LoRA"
        else:
            key, message = "modules_to_save", f"{target} is in target_modules, and would get no LoRA"
        yield Problem(message, "Remove it from one of the two", key=key)


def _unreached_layers(lora: Mapping[str, Any], adapted: list[str]) -> Iterator[Problem]:
    layers, given = lora.get("layers_to_transform"), lora.get("layers_pattern")
    if layers is None:
        return
    wanted = [layers] if isinstance(layers, int) else list(layers)
    patterns = [given] if isinstance(given, str) else list(given or [r"[^.]*"])
    numbers = {number for name in adapted for pattern in patterns for number in [layer_number(name, pattern)]}
    if missing := [layer for layer in wanted if layer not in numbers]:
        message = f"layer {', '.join(map(str, missing))} has none of target_modules"
        yield Problem(message, "Remove it, or name what it has", key="layers_to_transform")
    if others := sorted(number for number in numbers - set(wanted) if number is not None):
        message = f"target_modules names modules of layer {', '.join(map(str, others))} by their full path"
        yield Problem(message, "Remove them there, or add the layer here", key="layers_to_transform")


def _parameters_apart(model: Any, lora: Mapping[str, Any]) -> Iterator[Problem]:
    """Refuse keys that peft does not ask where it adapts parameters by name."""
    excluded, whole = lora.get("exclude_modules") or [], whole_modules(model, lora)
    for parameter in lora.get("target_parameters") or []:
        owners = {
            name: module
            for name, module in model.named_modules()
            for own, _ in module.named_parameters(recurse=False)
            if _is_named(f"{name}.{own}", parameter)
        }
        is_excluded = [
            bool(re.fullmatch(excluded, name))
            if isinstance(excluded, str)
            else any(_is_named(name, other) for other in excluded)
            for name in owners
        ]
        if any(is_excluded):
            message = f"{parameter} is in target_parameters, which peft adapts all the same"
            yield Problem(message, "Remove it from one of the two", key="exclude_modules")
        if any(id(module) in whole for module in owners.values()):
            message = f"{parameter} is in target_parameters, and trained whole as well"
            yield Problem(message, "Remove it from one of the two", key="modules_to_save")


def _unused_patterns(model: Any, lora: Mapping[str, Any], adapted: list[str]) -> Iterator[Problem]:
    """Name each pattern of a rank or an alpha that no adapted module takes; the first that matches one is taken."""
    reached = [*adapted, *_parameter_names(model, lora.get("target_parameters") or [])]
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = list(lora.get(key) or {})
        taken = {_first_match(patterns, name) for name in reached}
        for pattern in patterns:
            if pattern in taken:
                continue
            if any(_first_match([pattern], name) for name in reached):
                yield Problem(f"{pattern} has no effect: patterns before it take all it matches", "Remove it", key=key)
            else:
                yield Problem(f"{pattern} matches nothing that gets LoRA", "Remove it, or make it a target", key=key)


def _shared_starts(model: Any, lora: Mapping[str, Any], adapted: list[str]) -> Iterator[Problem]:
    """Refuse to take a part out of a matrix that another layer uses as well, which would change that layer, too."""
    if not changes_base(lora):
        return
    from torch.nn import Embedding

    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(name)
    for name in adapted:
        module = model.get_submodule(name)
        # On an embedding these starts begin at a product of zero.
        if isinstance(module, Embedding):
            continue
        others = set(users.get(id(getattr(module, "weight", None)), [])) - {name}
        if others or (module is model.get_output_embeddings() and is_tied(model)):
            other = min(others, default="the embedding").rpartition(".")[2]
            message = f"{name.rpartition('.')[2]} shares its matrix with {other}, from which "
            message += f"{lora['init_lora_weights']} would take a part as well"
            yield Problem(message, "Take it out, or set init_lora_weights: true", key="target_modules")


def _large_ranks(model: Any, lora: Mapping[str, Any], adapted: list[str]) -> Iterator[Problem]:
    start = lora.get("init_lora_weights", True)
    if not isinstance(start, str) or start.partition("_")[0] not in FROM_VECTORS:
        return
    patterns = lora.get("rank_pattern") or {}
    for name in adapted:
        shape = getattr(getattr(model.get_submodule(name), "weight", None), "shape", ())
        pattern = _first_match(patterns, name)
        rank = (lora.get("r") or lora_keys()["r"].default) if pattern is None else patterns[pattern]
        if shape and rank > min(shape):
            message = f"{start} takes the rank from the matrix, and {name} has {min(shape)} at most, less than {rank}"
            yield Problem(message, f"Set it to {min(shape)} or less", key="r" if pattern is None else "rank_pattern")
            return


def _parameter_names(model: Any, targets: Iterable[str]) -> list[str]:
    return [name for name, _ in model.named_parameters() if any(_is_named(name, target) for target in targets)]


def _first_match(patterns: Iterable[str], name: str) -> str | None:
    """Return the pattern that peft takes for a module: the first that matches the end of its path."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", name)), None)


def _is_named(full_name: str, name: str) -> bool:
    return full_name == name or full_name.endswith(f".{name}")
