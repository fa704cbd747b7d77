"""A recipe for another model, from the text of one: the line that names the model changes, every other one stays."""

import json
import re

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

# What YAML reads as text without quotes, and what a path or a Hub id is made of.
PLAIN = re.compile(r"(\.{0,2}/|~/)?[A-Za-z][\w.-]*(/[\w.-]+)*|\.{1,2}(/[\w.-]+)+|/[\w./-]+")
NOT_TEXT = {"null", "true", "false", "yes", "no", "on", "off"}
# Keys of the model section that say something about the other model.
OF_THE_MODEL = ("revision", "base_id")


def quoted(text: str) -> str:
    """Return a text as YAML reads it back, in quotes only where it needs them."""
    if PLAIN.fullmatch(text) and text.lower() not in NOT_TEXT:
        return text
    return json.dumps(text, ensure_ascii=False)


def render_copy(text: str, model: str, title: str) -> str:
    """Return the text of an accepted recipe for another model.

    `model.name_or_path` becomes `model`, the first line's comment becomes `title` (one is put there if the text has
    none), and what is about the other model alone (its revision and base_id, the hub section) goes with its lines.
    All else, comments and spacing included, stays byte for byte.
    """
    root = YAML(typ="safe", pure=True).compose(text)
    section = _child(root, "model")
    name = _child(section, "name_or_path")
    start, end = name.start_mark.index, name.end_mark.index
    edits = [(start, end, _padded(quoted(model), text, start, end))]
    assert isinstance(section, MappingNode)
    for key_node, value_node in section.value:
        if key_node.value in OF_THE_MODEL:
            if section.flow_style:
                edits.append((value_node.start_mark.index, value_node.end_mark.index, "null"))
                continue
            first = text.rindex("\n", 0, key_node.start_mark.index) + 1
            following = text.find("\n", value_node.end_mark.index)
            edits.append((first, len(text) if following < 0 else following + 1, ""))
    edits += _without_hub(root, text)
    for first, last, new in sorted(edits, reverse=True):
        text = text[:first] + new + text[last:]
    head, _, rest = text.partition("\n")
    return f"{title}\n{rest}" if head.startswith("#") else f"{title}\n{text}"


def _without_hub(root: Node, text: str) -> list[tuple[int, int, str]]:
    """Return the edit that takes the hub section out: the repository is the other model's."""
    assert isinstance(root, MappingNode)
    for key_node, value_node in root.value:
        if key_node.value != "hub":
            continue
        if root.flow_style:
            return [(value_node.start_mark.index, value_node.end_mark.index, "null")]
        # A block ends where the next one begins; what stands between, comments and blank lines, is not its own.
        last = value_node
        while isinstance(last, MappingNode) and not last.flow_style and last.value:
            last = last.value[-1][1]
        following = text.find("\n", last.end_mark.index)
        first = text.rfind("\n", 0, key_node.start_mark.index) + 1
        return [(first, len(text) if following < 0 else following + 1, "")]
    return []


def _padded(new: str, text: str, start: int, end: int) -> str:
    """Return the new value with what keeps a comment behind it in its column, as far as the value leaves room."""
    behind = text[end:].partition("\n")[0]
    spaces = len(behind) - len(behind.lstrip(" "))
    if not behind[spaces:].startswith("#"):
        return new
    lacking = (end - start) - len(new)
    return new + " " * lacking if lacking > 0 else new


def _child(node: Node, name: str) -> Node:
    assert isinstance(node, MappingNode), "the recipe has been read"
    for key_node, value_node in node.value:
        if isinstance(key_node, ScalarNode) and key_node.value == name:
            child: Node = value_node
            return child
    raise AssertionError(f"the recipe has been read, and has {name}")
