"""The JSON schema of a recipe, made from what the reader accepts, so that editors complete and check recipes.

Editors know less than the reader: a schema sees each key by itself, and no model, data or machine. What it accepts can
still be refused; what it marks is refused as well, but for numbers written in quotes, and a section written as null:
to a schema that is the same as one left empty, which is refused.
"""

import json
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args, get_origin

from pydantic import TypeAdapter

from tunebook.recipe.defaults import OUR_DEFAULTS
from tunebook.recipe.names import OWN, REQUIRED, SECTIONS, known_keys
from tunebook.recipe.rules import RANGES
from tunebook.recipe.upstream import UpstreamKey, lora_keys, quantization_keys, training_keys
from tunebook.recipe.values import shown

DIALECT = "http://json-schema.org/draft-07/schema#"  # the newest that editors' YAML servers know whole
CLASSES: Final[Mapping[str, tuple[str, Mapping[str, UpstreamKey]]]] = {
    "training": ("transformers.TrainingArguments", training_keys()),
    "lora": ("peft.LoraConfig", lora_keys()),
    "quantization": ("transformers.BitsAndBytesConfig", quantization_keys()),
}
TITLES: Final[Mapping[str, str]] = {
    "model": "The base model and the type it computes in.",
    "quantization": "How the base is quantised; leave the section out for an unquantised one.",
    "lora": "The adapter that is trained; leave the section out for full fine-tuning.",
    "data": "The rows, and how they become labelled tokens.",
    "training": "How it is trained: the keys of TrainingArguments, and a few of tunebook.",
    "hub": "Where the run is published when it has ended; leave the section out and nothing ever is.",
}


def build_schema() -> dict[str, Any]:
    """Return the schema as plain values, the same for the same installed packages."""
    definitions: dict[str, Any] = {}
    sections = {name: _section(name, definitions) for name in SECTIONS}
    sections["data"]["anyOf"] = [{"required": ["path"]}, {"required": ["sources"]}]
    return {
        "$schema": DIALECT,
        "title": "A tunebook recipe",
        "type": "object",
        "additionalProperties": False,
        "required": ["model", "data"],
        "properties": sections,
        "definitions": definitions,
    }


def _section(section: str, definitions: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {}
    if section in OWN:
        made = OWN[section].model_json_schema(ref_template="#/definitions/{model}")
        own, nested = made["properties"], made.pop("$defs", {})
        definitions |= {name: _cleaned(schema) for name, schema in nested.items()}
    properties = {}
    for name, annotation in known_keys(section).items():
        if name in own:
            properties[name] = _with_range(section, name, _cleaned(own[name]))
        elif annotation is not type(None):  # objects that no recipe can hold
            properties[name] = _with_range(section, name, _upstream(section, name, annotation))
    return {
        "description": TITLES[section],
        "type": "object",
        "additionalProperties": False,
        **({"required": [REQUIRED[section]]} if section in REQUIRED else {}),
        "properties": properties,
    }


def _upstream(section: str, name: str, annotation: Any) -> dict[str, Any]:
    made = _cleaned(TypeAdapter(annotation).json_schema())
    source, keys = CLASSES[section]
    default = keys[name].default
    text = f"{source}.{name}" + ("" if default is None else f", {shown(default)} by default there")
    if section == "training" and name in OUR_DEFAULTS:
        text += f", {shown(OUR_DEFAULTS[name])} here"
    words = _words(annotation)
    if {"no", "none"} & set(words) and False not in words:  # `no` without quotes, as YAML 1.1 would read it
        made = {"anyOf": [made, {"const": False}]}
    return {"description": text, **made}


def _words(annotation: Any) -> list[Any]:
    members = get_args(annotation) if get_origin(annotation) is not Literal else (annotation,)
    return [word for member in (members or ()) if get_origin(member) is Literal for word in get_args(member)]


def _with_range(section: str, name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Add the bounds that the reader has beside a type; they count for numbers alone."""
    low, high, _ = RANGES.get(f"{section}.{name}", (None, None, ""))
    bounds = {"minimum": low, "maximum": high}
    return {**schema, **{bound: value for bound, value in bounds.items() if value is not None}}


def _cleaned(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without the titles that pydantic makes of names, what may be one of several in a fixed order.

    typing keeps one order for equal unions in a process, that of whoever named the union first.
    """
    cleaned: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "title":
            continue
        if name == "properties":
            cleaned[name] = {key: _cleaned(inner) for key, inner in value.items()}
        elif isinstance(value, dict):
            cleaned[name] = _cleaned(value)
        elif name == "anyOf":
            cleaned[name] = sorted(map(_cleaned, value), key=json.dumps)
        elif isinstance(value, list):
            cleaned[name] = [_cleaned(item) if isinstance(item, dict) else item for item in value]
        else:
            cleaned[name] = value
    return cleaned
