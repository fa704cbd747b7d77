"""Recipe text to plain values, with the line of every key: YAML 1.2 through ruamel, nothing else.

The node graph is read rather than the loaded mapping, because only the graph shows duplicate keys and line numbers, and
shows all of them at once.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from tunebook.errors import Problem
from tunebook.system.spelling import near_words

TAG = "tag:yaml.org,2002:"
# YAML 1.2 core schema (https://yaml.org/spec/1.2.2/#103-core-schema): no underscores, no sexagesimals, no dates.
CORE_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
CORE_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
# Python refuses to read integers of more than some thousand digits; no key takes one of a hundred.
LONGEST_NUMBER = 100
COMMAND_LINE = "command line"
RECIPES = Path("recipes")
PLAIN_TAGS = {f"{TAG}{kind}" for kind in ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "value")}


@dataclass
class Source:
    """What was written: plain nested values, the place of each dotted key, and what was wrong with the writing."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    blank: set[str] = field(default_factory=set)  # keys with nothing after the colon, as against a written null
    overridden: set[str] = field(default_factory=set)
    undecided: set[str] = field(default_factory=set)  # keys whose value is wrong, so that nothing follows from them

    def place(self, key: str) -> str:
        """Return where `key`, or the nearest section above it, was written; "" if nowhere."""
        while key and key not in self.places:
            key = key.rpartition(".")[0]
        return self.places.get(key, self.places.get("", ""))


def read_source(path: str, overrides: Sequence[str] = ()) -> Source:
    """Read the recipe file and lay the `section.key=value` overrides over it.

    Never raises for bad input: everything wrong is in `problems`, in the order of the text.
    """
    source = Source(places={"": path})
    text = _read_text(path, source)
    if text is not None:
        _read_yaml(text, path, source)
    _apply_overrides(overrides, source)
    return source


def _read_text(path: str, source: Source) -> str | None:
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        source.problems.append(Problem("no such recipe", _suggest_recipe(path), where=path))
    except IsADirectoryError:
        source.problems.append(Problem("is a folder, not a recipe", _suggest_recipe(path), where=path or "''"))
    except UnicodeDecodeError as error:
        source.problems.append(Problem(f"is not UTF-8 text ({error.reason} at byte {error.start})", where=path))
    except OSError as error:
        source.problems.append(Problem(f"cannot be read: {error.strerror or error}", where=path))
    return None


def _suggest_recipe(path: str) -> str:
    there = Path(path) if Path(path).is_dir() else Path(path).parent
    beside, ours = (
        [found for found in sorted(folder.glob("*.yaml")) if found.name[0] != "."] for folder in (there, RECIPES)
    )
    near: list[Path] = []
    for found in (beside, ours):
        by_name = {recipe.name: recipe for recipe in found}
        near = near or [by_name[name] for name in near_words(Path(path).name, list(by_name), n=3)]
    near = near or beside[:5] or ours[:5]
    return f"Did you mean {' or '.join(map(str, near))}?" if near else "Give the path of a .yaml file"


def _read_yaml(text: str, path: str, source: Source) -> None:
    try:
        root = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else path
        reason = " ".join(part for part in (error.context, error.problem) if part)
        source.problems.append(Problem(f"is not YAML: {reason}", "Check indentation, quotes and brackets there", where))
        return
    except (YAMLError, ValueError, RecursionError) as error:
        source.problems.append(Problem(f"is not YAML: {str(error).splitlines()[0]}", where=path))
        return
    if root is None:
        source.problems.append(Problem("is empty", "Copy one from recipes/", where=path))
    elif not isinstance(root, MappingNode):
        source.problems.append(
            Problem("holds no sections", "A recipe is `section:` with `key: value` lines", where=path)
        )
    else:
        source.values = _Walk(path, source).mapping(root, "")


class _Walk:
    """One walk over the node graph of a file or of one override."""

    def __init__(self, path: str, source: Source, where: str = "") -> None:
        self.path, self.source, self.where = path, source, where
        self.seen: set[int] = set()

    def place(self, node: Node) -> str:
        return self.where or f"{self.path}:{node.start_mark.line + 1}"

    def problem(self, node: Node, key: str, message: str, fix: str = "") -> None:
        self.source.problems.append(Problem(message, fix, self.place(node), key))
        self.source.undecided.add(key)

    def mapping(self, node: MappingNode, above: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        lines: dict[str, list[Node]] = {}
        for key_node, value_node in node.value:
            name = key_node.value if isinstance(key_node, ScalarNode) else ""
            if not name or not str(key_node.tag).startswith(f"{TAG}str"):
                shown = name or "an empty text, a list or a mapping"
                self.problem(key_node, above, f"{shown} is no key", "Keys are names; put quotes around it if it is one")
                continue
            if "." in name and "." not in above:  # deeper, in a rank_pattern say, names of modules have dots
                self.problem(key_node, above, f"{name} is no key: it has a dot", "Write it below its section")
                continue
            key = f"{above}.{name}" if above else name
            lines.setdefault(name, []).append(key_node)
            self.source.places.setdefault(key, self.place(key_node))
            values.setdefault(name, self.value(value_node, key))
        for name, nodes in lines.items():
            if len(nodes) > 1:
                key = f"{above}.{name}" if above else name
                places = " and ".join(str(key_node.start_mark.line + 1) for key_node in nodes)
                self.problem(nodes[-1], key, f"is given {len(nodes)} times, on lines {places}", "Keep one of them")
        return values

    def value(self, node: Node, key: str) -> Any:
        if id(node) in self.seen:
            self.problem(node, key, "uses a YAML alias", "Write the value out; recipes are copied, not inherited")
            return None
        self.seen.add(id(node))
        if str(node.tag) not in PLAIN_TAGS:
            self.problem(node, key, f"uses the YAML tag {node.tag}", "Write a plain value")
            return None
        if isinstance(node, MappingNode):
            return self.mapping(node, key)
        if isinstance(node, SequenceNode):
            return [
                self.value(item, f"{key}[{number}]" if isinstance(item, MappingNode) else key)
                for number, item in enumerate(node.value)
            ]
        assert isinstance(node, ScalarNode)
        if node.value == "" and not node.style:
            self.source.blank.add(key)
        return scalar_value(node)


def scalar_value(node: ScalarNode) -> Any:
    """Return the value of a scalar under the YAML 1.2 core schema; whatever that schema doesn't know is text."""
    text, kind = node.value, str(node.tag).removeprefix(TAG)
    if kind == "null":
        return None
    if kind == "bool" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind == "int" and CORE_INT.fullmatch(text) and len(text) <= LONGEST_NUMBER:
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
    if kind == "float":
        special = {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}
        if text.lower() in special:
            return special[text.lower()]
        if CORE_FLOAT.fullmatch(text):
            return float(text)
    return text


def _apply_overrides(overrides: Sequence[str], source: Source) -> None:
    given: set[str] = set()
    for override in overrides:
        where = COMMAND_LINE  # never the value: it may be a secret
        key, equals, text = override.partition("=")
        if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
            problem = Problem(f"{key!r} is neither a recipe nor `section.key=value`", _override_fix(override), where)
            source.problems.append(problem)
            continue
        if key in given:
            source.problems.append(Problem("is given twice", "Keep one", where, key))
            continue
        given.add(key)
        _apply_override(key, text, where, source)


def _override_fix(override: str) -> str:
    if override.endswith((".yaml", ".yml")):
        return "Give one recipe at a time"
    return "Write for example training.learning_rate=1e-4"


def _apply_override(key: str, text: str, where: str, source: Source) -> None:
    try:
        node = YAML(typ="safe", pure=True).compose(text)
    except (YAMLError, ValueError, RecursionError):
        source.problems.append(Problem("is not a YAML value", "Quote it twice: key='\"text\"'", where, key))
        return
    if node is None:
        fix = "Write key=null to drop a section, or give a value"
        source.problems.append(Problem("has no value", fix, where, key))
        return
    *sections, name = key.split(".")
    target = source.values
    for depth, section in enumerate(sections):
        inner = target.get(section)
        if not isinstance(inner, dict):
            inner = target[section] = {}
            source.places[".".join(sections[: depth + 1])] = where
        target = inner
    for written in [place for place in source.places if place == key or place.startswith(f"{key}.")]:
        del source.places[written]
    source.places[key] = where
    source.overridden.add(key)
    value = _Walk("", source, where).value(node, key)
    if value is None and sections:
        target.pop(name, None)  # null drops a key, as it drops a section
    else:
        target[name] = value


def dotted_keys(values: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key of a nested mapping with its dotted name, depth first, mappings included."""
    for name, value in values.items():
        key = f"{above}.{name}" if above else name
        yield key, value
        if isinstance(value, dict):
            yield from dotted_keys(value, key)
