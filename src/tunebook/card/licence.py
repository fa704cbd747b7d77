"""The licence of a base, as the model card that was published with it says."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from tunebook.recipe.schema import Recipe
from tunebook.system.places import is_local, local_path
from tunebook.system.quiet import hub_asked

# A card that does not come at once is not worth waiting for at the end of a run.
SECONDS = 10.0
FRONT_MATTER = re.compile(r"\A\s*---\r?\n(.*?)\r?\n---", re.S)

HUB_ID = re.compile(r"[a-z0-9][a-z0-9.+-]*")
LINKED = ("license_name", "license_link")


@dataclass(frozen=True)
class Licence:
    """The fields of a model card about its licence: the Hub's id of it (`other` with a name), and a link."""

    ids: tuple[str, ...]
    name: str | None = None
    link: str | None = None

    def render(self) -> str:
        """Return the licence as a person names it."""
        if self.name and self.ids == ("other",):
            return self.name
        return ", ".join(self.ids)


def find_licence(recipe: Recipe, commit: str | None) -> Licence | None:
    """Return the licence that the base's own card names; None where there is no card, or it names none.

    The card is looked for in the base's folder, in the Hub's cache, and on the Hub for a few seconds at most.
    """
    name = recipe.model.name_or_path
    if is_local(name):
        found = _read(local_path(name) / "README.md", recipe.model.base_id)
        name, commit = recipe.model.base_id or "", recipe.model.revision
        if found or not name:
            return found
    with hub_asked(f"for the licence of {name}", f"{SECONDS:g} seconds"):
        path = _within(SECONDS, lambda: _find_card(name, commit or recipe.model.revision))
    return _read(Path(path), name) if path else None


def _find_card(name: str, revision: str | None) -> str | None:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.constants import is_offline_mode

    cached = try_to_load_from_cache(name, "README.md", revision=revision)
    if isinstance(cached, str):
        return cached
    if is_offline_mode():
        return None
    return str(hf_hub_download(name, "README.md", revision=revision, etag_timeout=SECONDS / 2))


def _within(seconds: float, ask: Callable[[], str | None]) -> str | None:
    """Return the answer, or None where asking fails or takes longer: whatever went wrong, the licence is not known."""
    answers: list[str | None] = []

    def answer() -> None:
        try:
            answers.append(ask())
        except Exception:  # a Hub that is not there, has no such card or asks for a token: many kinds
            answers.append(None)

    thread = Thread(target=answer, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def _read(card: Path, base: str | None) -> Licence | None:
    """Return what a card says of its licence; a link to a file beside it leads to the base on the Hub, or nowhere."""
    from ruamel.yaml import YAML

    try:
        found = FRONT_MATTER.search(card.read_text(encoding="utf-8", errors="replace"))
        fields = YAML(typ="safe", pure=True).load(found.group(1)) if found else None
    except Exception:  # someone else's file: no YAML, a date that is none, thousands of brackets
        return None
    if not isinstance(fields, dict):
        return None
    given = fields.get("license")
    ids = tuple(one for one in (given if isinstance(given, list) else [given]) if isinstance(one, str) and one.strip())
    name, link = (fields.get(key) if isinstance(fields.get(key), str) else None for key in LINKED)
    if link and not link.startswith(("http://", "https://")):
        link = f"https://huggingface.co/{base}/blob/main/{link}" if base else None
    if not all(HUB_ID.fullmatch(one) for one in ids):  # a licence in words, which the Hub knows by no id
        ids, name = ("other",), name or ", ".join(ids)
    return Licence(ids, name, link) if ids else None
