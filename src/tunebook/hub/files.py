"""What of a run goes to the Hub: the adapter folder and the recipe, and nothing of the machine or a secret."""

import codecs
import io
import json
import re
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from tunebook.errors import Problem, Refused
from tunebook.system.places import is_local
from tunebook.system.secret_text import OWNED_PATH, SECRETS

# What an adapter folder, or that of a whole model, is made of. Anything else that lies there stays where it is.
SUFFIXES = (".safetensors", ".json", ".jinja", ".md", ".png", ".svg", ".txt", ".model", ".tiktoken")
BESIDE = ("README.md", "loss.png")  # taken from the run folder where the adapter folder has none
# A value that is a path from the root, as JSON and YAML write it.
ANY_PATH = re.compile(rb"""(?:["']|:\s|-\s)/[\w.-]+/[\w./-]+|\b[A-Z]:\\\\\w+""")
LARGEST_TEXT = 2**26


@dataclass(frozen=True)
class HubFile:
    """One file of the repository: its name there, and where its content is (a path), or the content itself."""

    name: str
    content: Path | bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size


def read_run_recipe(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the stem and the plain values of the recipe in a run folder; its rows and base need not be here."""
    found = sorted(folder.glob("*.yaml"))
    if len(found) != 1:
        raise Refused(Problem(f"{len(found)} recipes are there, and a run has one", where=str(folder)))
    try:
        values = YAML(typ="safe", pure=True).load(found[0].read_text(encoding="utf-8"))
    except (YAMLError, ValueError) as error:
        raise Refused(Problem("cannot be read as YAML", where=str(found[0]))) from error
    if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
        raise Refused(Problem("is no recipe of a run", where=str(found[0])))
    return found[0].stem, values


def list_files(folder: Path) -> list[HubFile]:
    """Return what is pushed of a run folder, by name. Raises Refused where it has no adapter and no model."""
    adapter = folder / "adapter"
    check_no_links(folder)
    paths = [path for path in sorted(adapter.rglob("*")) if path.is_file() and path.suffix in SUFFIXES]
    shown = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(adapter).parts)]
    files = [HubFile(path.relative_to(adapter).as_posix(), path) for path in shown]
    names = {file.name for file in files}
    if not {"adapter_config.json", "config.json"} & names or not any(name.endswith(".safetensors") for name in names):
        raise Refused(Problem("no adapter there", "Train the run to its end", str(adapter)))
    files += [HubFile(name, folder / name) for name in BESIDE if name not in names and (folder / name).is_file()]
    stem, values = read_run_recipe(folder)
    files.append(HubFile(f"{stem}.yaml", render_public_recipe(values).encode()))
    return sorted(files, key=lambda file: file.name)


def check_no_links(folder: Path) -> None:
    """Raise Refused where links stand among what a run folder gives to others: they may lead to anything."""
    adapter = folder / "adapter"
    found = [
        path
        for path in sorted(adapter.rglob("*"))
        if path.is_symlink() and not any(part.startswith(".") for part in path.relative_to(adapter).parts)
    ]
    found += [folder / name for name in BESIDE if (folder / name).is_symlink()]
    if found:
        fix = "Put the file itself there, or take it out"
        raise Refused([Problem("is a link, which is not followed", fix, str(path)) for path in found])


def render_public_recipe(values: dict[str, Any]) -> str:
    """Return a recipe as others can use it: the base by its public name, and paths of this machine cut to their end."""
    written = {name: section for name, section in values.items() if name != "hub"}
    model = dict(written["model"])
    if base := model.pop("base_id", None):
        model["name_or_path"] = base
    text = io.StringIO()
    writer = YAML()
    writer.default_flow_style = False
    writer.dump(_without_paths({**written, "model": model}), text)
    return f"# The recipe of this run. Paths that began at the root are cut to their last part.\n{text.getvalue()}"


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_paths(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_paths(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~", "../")) else value


def find_leaks(files: list[HubFile], folder: Path, token: str | None) -> list[Problem]:
    """Return a problem for every file with a secret, a path of this machine or its name; none shows what it found."""
    here = _paths_of_machine(folder)
    problems = []
    for file in files:
        content = _readable(file.content)
        strict = file.name.endswith(("config.json", ".yaml"))  # written by programs, with no text of other people
        kinds: list[tuple[str, str, re.Pattern[bytes] | None]] = []
        if SECRETS.search(content) or (token and token.encode() in content):
            kinds.append(("a secret, such as a token", "Take it out, and revoke it", SECRETS))
        patterns = (here, OWNED_PATH, ANY_PATH) if strict else (here, OWNED_PATH)
        if pattern := next((one for one in patterns if one.search(content)), None):
            shown = _shown(pattern.findall(content)[0])
            kinds.append((f"a path of this machine, {shown}", "Take it out", pattern))
        if _names_machine(content):
            kinds.append(("the name of this machine", "Take it out", None))
        problems += [Problem(f"would publish {what}", fix, _place(file, content, kind)) for what, fix, kind in kinds]
    return problems


def _shown(found: bytes) -> str:
    return found.decode("utf-8", "replace")[:60]


def _place(file: HubFile, content: bytes, pattern: re.Pattern[bytes] | None) -> str:
    name = str(file.content) if isinstance(file.content, Path) else file.name
    found = pattern.search(content) if pattern is not None else None
    return name if found is None or b"\0" in content else f"{name}:{content.count(10, 0, found.start()) + 1}"


def _readable(content: Path | bytes) -> bytes:
    """Return the part of a file that can hold words: all of it, or what stands before the numbers of safetensors."""
    if isinstance(content, bytes):
        return _as_utf8(content)
    with content.open("rb") as file:
        if content.suffix == ".safetensors":
            return file.read(min(int.from_bytes(file.read(8), "little"), LARGEST_TEXT))
        return _as_utf8(file.read(LARGEST_TEXT))


def _as_utf8(content: bytes) -> bytes:
    """Return a text that begins as UTF-16 does in UTF-8, in which the words are looked for."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16", "replace").encode("utf-8", "replace")
    return content


def _paths_of_machine(folder: Path) -> re.Pattern[bytes]:
    """Return what matches a path below the folders that this program runs in and writes to."""
    places = {Path.cwd(), Path.home(), Path(tempfile.gettempdir()), *_above(folder.resolve())}
    names = sorted({str(place).rstrip("/") for place in places if str(place) != "/"}, key=len, reverse=True)
    either = b"|".join(re.escape(name.encode()) for name in names) or b"(?!)"
    return re.compile(rb"(?:(?<![\w.:/-])|(?<=\\[nrtbf])|\bfile://)(?:" + either + rb")/\w[^\s\"']*")


def _above(folder: Path) -> Iterator[Path]:
    """Return the folder and those above it that are deep enough to tell of this machine."""
    return (place for place in (folder, *folder.parents) if len(place.parts) > 2)


def _names_machine(content: bytes) -> bool:
    """Whether the host's name stands there; names that are words, such as `gpu`, say nothing."""
    name = socket.gethostname().encode()
    tells = len(name) >= 6 and re.search(rb"[\d.-]", name)
    return bool(tells and re.search(rb"(?<![\w.-])" + re.escape(name) + rb"(?![\w-])", content))


def check_base_named(folder: Path, values: dict[str, Any], revision: str | None) -> None:
    """Raise Refused where nobody else could find the base; `revision` is the commit that a base of the Hub has."""
    model, settings = values["model"], folder / "adapter" / "adapter_config.json"
    base = model.get("base_id") or model.get("name_or_path")
    if model.get("base_id") is None and (revision is None or is_local(str(base))):
        message = f"the base was loaded from the folder {base}, where nobody else finds it"
        fix = "Write its owner/name as model.base_id into the recipe in the run folder"
        raise Refused(Problem(message, fix, str(folder), "model.base_id"))
    if settings.is_file():
        named = json.loads(settings.read_text(encoding="utf-8")).get("base_model_name_or_path")
        # What was a folder when the run ended is named anew, as the recipe says now.
        if named not in (base, model.get("name_or_path")):
            fix = f"Set base_model_name_or_path there to {base}, if that is the base"
            raise Refused(Problem(f"the base is called {named} there, and {base} in the recipe", fix, str(settings)))
