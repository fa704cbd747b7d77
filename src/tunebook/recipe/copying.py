"""A recipe for another model, from the text of one: the lines that name the model change, all others stay."""

import json
import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from tunebook.errors import Problem, Refused

# What YAML reads as text without quotes, and what a path or a Hub id is made of.
PLAIN = re.compile(r"(\.{0,2}/|~/)?[A-Za-z][\w.-]*(/[\w.-]+)*|\.{1,2}(/[\w.-]+)+|/[\w./-]+")
NOT_TEXT = {"null", "true", "false", "yes", "no", "on", "off"}
TEXT = "tag:yaml.org,2002:str"
# Keys of the model section that say something about the other model.
OF_THE_MODEL = ("revision", "base_id")
# A title is written by hand with the hardware, or by `tunebook new` with the source.
TITLES = re.compile(r"Hardware: |, copied from ")
FOR_PROGRAMS = re.compile(r"#\s*(!|yaml-language-server:|yamllint |vim?:|-\*-|%|SPDX-)")


def quoted(text: str) -> str:
    """Return a text as YAML reads it back, in quotes only where it needs them."""
    if PLAIN.fullmatch(text) and text.lower() not in NOT_TEXT:
        return text
    return json.dumps(text, ensure_ascii=False)


def render_copy(text: str, model: str, title: str, path: str = "") -> str:
    """Return the text of an accepted recipe for another model; `path` is where the text was read.

    `model.name_or_path` becomes `model`, the comment that titles the recipe becomes `title` (put on top where there is
    none), and what is about the other model alone (its revision and base_id, the hub section) goes with its lines. All
    else, comments and spacing included, stays byte for byte. Raises Refused where the text names no model to put
    another in the place of, or names it in a way that the copy would not read back.
    """
    root = YAML(typ="safe", pure=True).compose(text)
    section = _child(root, "model")
    name = _child(section, "name_or_path")
    if not (isinstance(section, MappingNode) and isinstance(name, ScalarNode) and str(name.tag) == TEXT and name.value):
        fix = "Write `model:` with a line `name_or_path: ORG/NAME` below it, or copy another recipe"
        raise Refused(Problem("names no model that another could take the place of", fix, path, "model.name_or_path"))
    start, end = name.start_mark.index, _end(name, text)
    edits = [(start, end, _padded(quoted(model) + _header_comment(name, text), text, start, end))]
    for key_node, value_node in section.value:
        if key_node.value in OF_THE_MODEL:
            value_end = _end(value_node, text)
            if section.flow_style:
                edits.append((value_node.start_mark.index, value_end, "null"))
                continue
            first = text.rindex("\n", 0, key_node.start_mark.index) + 1
            following = text.find("\n", value_end)
            edits.append((first, len(text) if following < 0 else following + 1, ""))
    edits += _without_hub(root, text)
    copied = text
    for first, last, new in sorted(edits, reverse=True):
        copied = copied[:first] + new + copied[last:]
    copied = _titled(copied, title, name.value)
    if not _is_copy(copied, text, model):
        where = f"{path}:{name.start_mark.line + 1}" if path else ""
        message, fix = "is written in a way that cannot be copied", "Write the section with one key on each line"
        raise Refused(Problem(message, fix, where, "model.name_or_path"))
    return copied


def _end(node: Node, text: str) -> int:
    """Return where a value's text ends; the mark of one in several lines (`>-`) stands behind the last line break."""
    start: int = node.start_mark.index
    return start + len(text[start : node.end_mark.index].rstrip())


def _header_comment(node: ScalarNode, text: str) -> str:
    """Return the comment behind the `>-` or `|` of a text in lines of its own, which goes with them."""
    header = text[node.start_mark.index :].partition("\n")[0].rstrip("\r")
    _, sign, comment = header.partition(" #")
    return f"  #{comment}" if node.style in (">", "|") and sign else ""


def _titled(text: str, title: str, old_model: str) -> str:
    """Return the text with `title` for its own, which speaks of hardware, of its source, or first of all of the model.

    Any other comment on top says something else (an editor's schema, a licence) and stays, below the title.
    """
    lines = text.split("\n")
    top = lines[: next((number for number, line in enumerate(lines) if line.strip() and line[0] != "#"), len(lines))]
    comments = [number for number, line in enumerate(top) if line.startswith("#") and not FOR_PROGRAMS.match(line)]
    for number in comments:
        names_it = number == comments[0] and old_model.rpartition("/")[2].lower() in lines[number].lower()
        if names_it or TITLES.search(lines[number]):
            lines[number] = title + ("\r" if lines[number].endswith("\r") else "")
            return "\n".join(lines)
    return "\n".join([title + ("\r" if lines[0].endswith("\r") else ""), *lines])


def _is_copy(copied: str, text: str, model: str) -> bool:
    """Whether a copy reads as the text does but for the model and what is about it alone."""
    try:
        read, expected = (_plain(YAML(typ="safe", pure=True).compose(one)) for one in (copied, text))
    except YAMLError:
        return False
    for sections in (read, expected):
        sections.pop("hub", None)
        sections["model"] = {name: value for name, value in sections["model"].items() if name not in OF_THE_MODEL}
    expected["model"]["name_or_path"] = (TEXT, model)
    return bool(read == expected)


def _plain(node: Node) -> Any:
    """Return a node graph as values that can be compared; a scalar with its tag, which tells "1" from 1."""
    if isinstance(node, MappingNode):
        return {key.value: _plain(value) for key, value in node.value}
    if isinstance(node, SequenceNode):
        return [_plain(item) for item in node.value]
    return (str(node.tag), node.value)


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
        following = text.find("\n", _end(last, text))
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


def _child(node: Node | None, name: str) -> Node | None:
    for key_node, value_node in node.value if isinstance(node, MappingNode) else ():
        if isinstance(key_node, ScalarNode) and key_node.value == name:
            child: Node = value_node
            return child
    return None
