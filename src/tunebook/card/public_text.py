"""Values of a recipe as they can be shown to others: without the paths of this machine, and without tokens."""

import re
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from tunebook.system.secret_text import hide_tokens


def shown_value(value: Any) -> Any:
    """Return a nested value of a recipe with its local paths cut to their last part, and tokens hidden."""
    if isinstance(value, dict):
        return {name: shown_value(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [shown_value(inner) for inner in value]
    return hide_tokens(last_part(value)) if isinstance(value, str) else value


def last_part(text: str) -> str:
    """Return the last part of a path that says where something is on this machine; any other text as it is.

    A relative path below the current folder, such as `data/rows.jsonl`, tells nothing of it.
    """
    address = text.removeprefix("file://")
    if re.match(r"[A-Za-z]:[\\/]", address):
        return PureWindowsPath(address).name or "folder"
    path = PurePosixPath(address)
    is_path = address.startswith(("/", "~")) or ".." in path.parts
    return (path.name.strip(".~") or "folder") if is_path else text


def cell(value: Any) -> str:
    """Return a value as one cell of a Markdown table, with nothing in it that Markdown or HTML would take up."""
    text = " ".join(hide_tokens(str(value)).split())
    return re.sub(r"([\\|`*_\[\]])", r"\\\1", text).replace("&", "&amp;").replace("<", "&lt;")
