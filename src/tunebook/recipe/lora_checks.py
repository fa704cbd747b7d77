"""What in a lora section cannot work, as far as it can be told without the model."""

import re
from typing import Any

from tunebook.recipe.checking import Report, Sections
from tunebook.recipe.values import nearest_word, shown

# What init_lora_weights takes beside true and false; pissa_niter_N is one more.
STARTS = ("gaussian", "olora", "pissa", "orthogonal", "mica", "corda", "eva", "loftq")
# These draw the adapter from the base's own weights, which must be there unquantised.
NEED_WEIGHTS = ("pissa", "olora", "orthogonal", "mica")
NEED_DATA = ("corda", "eva")
# These take their part out of the base weights, and come out as the plain LoRA that puts it back.
CHANGE_BASE = ("pissa", "olora")


def _check_targets(sections: Sections, report: Report) -> None:
    for name in ("target_modules", "modules_to_save", "target_parameters"):
        if sections.get(f"lora.{name}") in ([], ""):
            report(f"lora.{name}", "is empty", "Name modules, or remove it; all linear layers are the default")
    for name in ("target_modules", "exclude_modules"):
        pattern = sections.get(f"lora.{name}")
        if isinstance(pattern, str) and (error := _regex_error(pattern)):
            report(f"lora.{name}", f"is no regular expression: {error}", "Mend it, or give a list of names")


def _check_layers(sections: Sections, report: Report) -> None:
    layers, pattern = sections.get("lora.layers_to_transform"), sections.get("lora.layers_pattern")
    if layers == []:
        report("lora.layers_to_transform", "is empty", "Name layers, or remove it; all layers are the default")
    if pattern in ([], ""):
        report("lora.layers_pattern", "is empty", "Name the list of layers, or remove it")
    for part in [pattern] if isinstance(pattern, str) else pattern or []:
        if error := _regex_error(part):
            report("lora.layers_pattern", f"{part} is no regular expression: {error}", "Mend it")
    if pattern and layers is None:
        report(
            "lora.layers_pattern", "has no effect without layers_to_transform", "Add layers_to_transform or remove it"
        )
    if layers is not None and not isinstance(sections.get("lora.target_modules"), list):
        fix = "Add target_modules: [q_proj, v_proj] or the like"
        report("lora.layers_to_transform", "needs a list of names in target_modules", fix)
    if layers is not None and sections.get("lora.target_parameters"):
        fix = "Write the layers into their names, such as layers.0.mlp.up_proj.weight"
        report("lora.layers_to_transform", "has no effect on target_parameters", fix)


def _check_patterns(sections: Sections, report: Report) -> None:
    for name in ("rank_pattern", "alpha_pattern"):
        for pattern, number in (sections.get(f"lora.{name}") or {}).items():
            if error := _regex_error(pattern):
                report(f"lora.{name}", f"{pattern} is no regular expression: {error}", "Mend it")
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                report(f"lora.{name}", f"{pattern} has {shown(number)}, expected a whole number, at least 1", "Mend it")


def _check_token_indices(sections: Sections, report: Report) -> None:
    key = "lora.trainable_token_indices"
    given: Any = sections.get(key)
    lists = list(given.values()) if isinstance(given, dict) else [given]
    if given is not None and (not lists or [] in lists):
        report(key, "is empty", "Name token ids, or remove it")
        return
    for indices in lists if given is not None else []:
        if not isinstance(indices, list) or not all(type(index) is int and index >= 0 for index in indices):
            report(key, f"got {shown(indices)}, expected a list of token ids", "Mend it")
        elif len(set(indices)) < len(indices):
            report(key, f"names {next(one for one in indices if indices.count(one) > 1)} twice", "Keep it once")


def _check_start(sections: Sections, report: Report) -> None:
    start = sections.get("lora.init_lora_weights", True)
    if not isinstance(start, str):
        return
    key, kind = "lora.init_lora_weights", start.partition("_")[0]
    if start not in STARTS and not re.fullmatch(r"pissa_niter_[1-9]\d*", start):
        near = nearest_word(start, STARTS)
        allowed = f"true, false, pissa_niter_N or {', '.join(STARTS)}"
        report(key, f"got {shown(start)}, expected {allowed}", f"Nearest: {near}" if near else "Use true")
    elif kind == "loftq":
        message = "loftq quantises the base once more, on a GPU alone, in a pass of its own before training"
        report(key, message, "Use true; the base is quantised by the quantization section")
    elif kind in NEED_DATA:
        report(key, f"{start} needs a pass of its own over data before training", "Use true or gaussian")
    elif kind in CHANGE_BASE and sections.get("lora.use_dora"):
        message = f"{start} changes the base, and what DoRA learns beside it fits no other base"
        report("lora.use_dora", message, "Remove it, or set init_lora_weights: true")
    elif kind in NEED_WEIGHTS and sections.has("quantization"):
        fix = "Remove the quantization section, or use true or gaussian"
        report(key, f"{start} is made from the base weights, which are quantised", fix)


def _check_start_beside(sections: Sections, report: Report) -> None:
    """What a start or a kind of layer cannot have beside it, as peft would say once the weights are there."""
    start = sections.get("lora.init_lora_weights", True)
    if sections.get("lora.lora_bias") and not isinstance(start, bool):
        report("lora.lora_bias", f"has no meaning beside init_lora_weights: {start}", "Remove one of the two")
    if sections.get("lora.lora_bias") and sections.get("lora.use_dora"):
        report("lora.lora_bias", "DoRA has no bias of its own", "Remove it, or use_dora")
    ranks = [sections.get("lora.r", 8), *(sections.get("lora.rank_pattern") or {}).values()]
    if start == "orthogonal" and any(isinstance(rank, int) and rank % 2 for rank in ranks):
        report("lora.r", "an orthogonal start needs even ranks", "Make it even, also in rank_pattern")
    by_name = sections.get("lora.target_parameters")
    for name, words in (("use_dora", "DoRA"), ("velora_config", "VeLoRA"), ("lora_dropout", "dropout")):
        if by_name and sections.get(f"lora.{name}"):
            report(f"lora.{name}", f"target_parameters cannot have {words}", "Remove it, or target modules instead")
    for name in ("use_dora", "target_parameters", "velora_config"):
        if start == "mica" and sections.get(f"lora.{name}"):
            report(f"lora.{name}", "mica cannot have it beside it", "Remove it, or set init_lora_weights: true")


def _check_dora(sections: Sections, report: Report) -> None:
    if sections.get("lora.use_dora") and sections.get("quantization.load_in_8bit"):
        # peft 0.21 takes the scales of 8-bit weights before their first use, and bitsandbytes 0.50 then has none.
        fix = "Use load_in_4bit: true, or remove use_dora"
        report("lora.use_dora", "DoRA on an 8-bit base stops at the first step", fix)


def _check_new_tokens(sections: Sections, report: Report) -> None:
    key, tokens = "model.add_special_tokens", sections.get("model.add_special_tokens") or []
    blank = [token for token in tokens if not token.strip()]
    if blank:
        report(key, f"{shown(blank[0])} is no token", "Name tokens such as <|tool|>")
    twice = sorted({token for token in tokens if tokens.count(token) > 1})
    if twice:
        report(key, f"{', '.join(twice)} is named twice", "Keep it once")
    if tokens and sections.get("lora.trainable_token_indices") is not None:
        message = "is given beside model.add_special_tokens, whose rows are trained"
        report("lora.trainable_token_indices", message, "Remove it")


def _regex_error(pattern: object) -> str:
    try:
        re.compile(str(pattern))
    except re.error as error:
        return str(error)
    return ""


LORA_CHECKS = (
    _check_targets,
    _check_layers,
    _check_patterns,
    _check_token_indices,
    _check_start,
    _check_start_beside,
    _check_dora,
    _check_new_tokens,
)
