"""Which keys there are, and what somebody meant who wrote another one."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel

from tunebook.recipe.rules import GONE, REFUSED, REFUSED_LORA, RENAMED
from tunebook.recipe.schema import BatchSection, DataSection, HubSection, ModelSection
from tunebook.recipe.upstream import installed, lora_keys, quantization_keys, training_keys
from tunebook.system.spelling import near_words

SECTIONS = ("model", "quantization", "lora", "data", "training", "hub")
# data needs a path or sources, which is checked where both can be seen.
REQUIRED = {"model": "name_or_path", "hub": "repo"}
OWN: Mapping[str, type[BaseModel]] = {
    "model": ModelSection,
    "data": DataSection,
    "training": BatchSection,
    "hub": HubSection,
}


def refused_keys(section: str) -> Mapping[str, tuple[str, str]]:
    """Return the upstream keys that a section doesn't take, each with the reason and what to do."""
    return {"training": REFUSED, "lora": REFUSED_LORA}.get(section, {})


@cache
def known_keys(section: str) -> Mapping[str, Any]:
    """Return the keys that a section takes, with their types; those refused with a reason are not among them."""
    own = {name: field.annotation for name, field in OWN[section].model_fields.items()} if section in OWN else {}
    upstream = {"training": training_keys, "lora": lora_keys, "quantization": quantization_keys}
    theirs = {name: key.annotation for name, key in upstream[section]().items()} if section in upstream else {}
    refused = refused_keys(section)
    return {name: annotation for name, annotation in {**own, **theirs}.items() if name not in refused}


@dataclass(frozen=True)
class Explained:
    """What is wrong with a key, what to write, and the key that was probably meant ("" if that cannot be told)."""

    message: str
    fix: str
    meant: str = ""


def explain_unknown_section(name: str) -> Explained:
    """Return what is wrong with a top-level key that is no section, and what to write."""
    found = _elsewhere(name)
    if found:
        return found
    near = near_words(name.lower(), SECTIONS, n=1, cutoff=0.6)
    if near:
        return Explained("is no section", f"Nearest: {near[0]}", near[0])
    return _near_elsewhere(name) or Explained("is no section", f"Sections are {', '.join(SECTIONS)}")


def explain_unknown_key(section: str, name: str) -> Explained:
    """Return what is wrong with a key that its section doesn't take, and what to write."""
    if name in refused_keys(section):
        reason, fix = refused_keys(section)[name]
        return Explained(f"cannot be set: {reason}", fix)
    near = _nearest(name, known_keys(section))
    found = _elsewhere(name)
    if found and not (near and _plain(near) == _plain(name)):
        return found
    if near:
        return Explained("unknown key", f"Nearest: {near}", f"{section}.{near}")
    package = {"training": "transformers", "lora": "peft", "quantization": "transformers"}.get(section)
    keys = f"Keys are {', '.join(known_keys(section))}"
    return _near_elsewhere(name) or Explained(
        "unknown key", f"{installed(package)} has no such argument" if package else keys
    )


def _plain(name: str) -> str:
    return re.sub(r"[-_. ]", "", name.lower())


def _nearest(name: str, names: Iterable[str]) -> str | None:
    by_plain = {_plain(known): known for known in names}
    near = near_words(_plain(name), list(by_plain), n=1, cutoff=0.75)
    return by_plain[near[0]] if near else None


def _all_keys() -> list[str]:
    return [f"{section}.{name}" for section in SECTIONS for name in known_keys(section)]


def _elsewhere(name: str) -> Explained | None:
    """Explain a name that is known, but foreign, old, flat or in another section."""
    plain = _plain(name)
    for old, reason in GONE.items():
        if _plain(old) == plain:
            return Explained("unknown key", f"{reason[0].upper()}{reason[1:]}", RENAMED.get(old, ""))
    for old, key in RENAMED.items():
        if _plain(old) == plain:
            return Explained("unknown key", f"It is called {key}", key)
    for key in _all_keys():
        section, _, known = key.partition(".")
        if plain in (_plain(known), _plain(key)):
            return Explained("unknown key", f"It belongs to `{section}:`, as {key}", key)
    refused = next((known for known in REFUSED if _plain(known) == plain), None)
    return Explained(f"cannot be set: {REFUSED[refused][0]}", REFUSED[refused][1]) if refused else None


def _near_elsewhere(name: str) -> Explained | None:
    keys = {key.partition(".")[2]: key for key in _all_keys()}
    near = _nearest(name, keys)
    return Explained("unknown key", f"Nearest: {keys[near]}", keys[near]) if near else None
