"""Whether a written value is of the type that a key takes; the text of numbers and of `no` is read as meant."""

import math
import re
from collections.abc import Sequence
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tunebook.recipe.source import CORE_FLOAT, CORE_INT, LONGEST_NUMBER
from tunebook.system.spelling import near_words

OFF_WORDS = {"no", "off", "false", "none"}
NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping",
    type(None): "null",
}


class WrongValue(ValueError):
    """A value is not what a key takes; the text says what was got and what is allowed."""


def read_value(value: Any, annotation: Any) -> Any:
    """Return `value` as `annotation` has it, or raise WrongValue.

    `"1e-4"` in quotes is a number where a number is due, a whole number is taken for a float, and no, off and none
    mean the word that the key has for it. Nothing else is converted: `"false"` is text, 1 is not true, 8.0 is no int.
    """
    value = _as_meant(value.strip() if isinstance(value, str) else value, annotation)
    try:
        read = _adapter(annotation).validate_python(value)
    except (ValidationError, OverflowError) as error:
        raise WrongValue(f"got {shown(value)}, expected {described(annotation)}{_hint(value, annotation)}") from error
    if _has_nonfinite(read):
        raise WrongValue(f"got {shown(value)}, expected finite numbers")
    return read


@cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation, config=ConfigDict(strict=True))


def _members(annotation: Any) -> Sequence[Any]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _as_meant(value: Any, annotation: Any) -> Any:
    members = _members(annotation)
    words = {word for member in members if get_origin(member) is Literal for word in get_args(member)}
    off = next((word for word in ("no", "none") if word in words), None)
    if (
        off
        and (value is False or (isinstance(value, str) and value.lower() in OFF_WORDS))
        and value not in words - {"none"}
    ):
        return off
    if isinstance(value, str) and str not in members:
        text = value.strip()
        if int in members and CORE_INT.fullmatch(text) and len(text) <= LONGEST_NUMBER:
            return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
        if float in members and CORE_FLOAT.fullmatch(text):
            return float(text)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if is_whole and float in members and int not in members and abs(value) < 1e300:
        return float(value)
    return value


def _has_nonfinite(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_nonfinite(item) for item in value.values())
    if isinstance(value, list):
        return any(_has_nonfinite(item) for item in value)
    return isinstance(value, float) and not math.isfinite(value)


def shown(value: Any) -> str:
    """Return a value as a reader of YAML would write it."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text '{value if len(value) < 60 else value[:57] + '...'}'"
    text = "a mapping" if isinstance(value, dict) else str(value)
    return text if len(text) < 60 else text[:57] + "..."


def described(annotation: Any) -> str:
    """Return what a type takes, in words."""
    parts: list[str] = []
    for member in _members(annotation):
        if member is type(None):
            continue
        if get_origin(member) is Literal:
            words = _words(member)
            parts.append(", ".join(words) if len(words) <= 16 else f"one of {len(words)} names")
        elif get_origin(member) is list or member is list:
            inner = get_args(member)
            parts.append(f"a list of {described(inner[0]).removeprefix('a ')}" if inner else "a list")
        else:
            parts.append(NAMES.get(member, "a value"))
    return " or ".join(dict.fromkeys(parts)) or "nothing: it takes an object that a recipe cannot hold"


def _words(literal: Any) -> list[str]:
    return [str(word).lower() if isinstance(word, bool) else str(word) for word in get_args(literal)]


def _hint(value: Any, annotation: Any) -> str:
    members = _members(annotation)
    words = [word for member in members if get_origin(member) is Literal for word in _words(member)]
    if isinstance(value, str) and len(words) > 1:
        near = nearest_word(value, words)
        return f"; nearest: {near}" if near else ""
    if bool in members and isinstance(value, str):
        return " without quotes" if value.lower() in ("true", "false") else ""
    if int in members and isinstance(value, float) and math.isfinite(value) and value == int(value):
        return f", written {int(value)}"
    if isinstance(value, str) and (int in members or float in members) and re.fullmatch(r"[\d_,.]+", value):
        return " without separators"
    if str in members and isinstance(value, int | float) and not isinstance(value, bool):
        return " in quotes"
    return ""


def nearest_divisors(whole: int, wanted: int, most: int) -> list[int]:
    """Return up to `most` divisors of `whole` near `wanted`, smallest first; 1 if none is within some thousands."""
    found: list[int] = []
    for distance in range(4096):
        for divisor in (wanted - distance, wanted + distance) if distance else (wanted,):
            if 1 <= divisor <= whole and whole % divisor == 0:
                found.append(divisor)
        if len(found) >= most:
            break
    return sorted(found[:most]) or [1]


def nearest_word(written: str, words: Sequence[str]) -> str:
    """Return the word that was probably meant: one that begins so, else one spelt alike, else ""."""
    near = [word for word in words if word.startswith(written)] or near_words(written, words, n=1)
    return near[0] if near else ""
