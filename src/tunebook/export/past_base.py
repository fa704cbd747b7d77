"""The base of a past run, as it is found here: the very one that it was trained on, or none."""

import json
import shlex
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tunebook.errors import Problem, Refused
from tunebook.export.finished import Finished
from tunebook.runs.folder import read_begun
from tunebook.runs.identity import folder_digest, tokenizer_digest
from tunebook.system.places import is_local, is_local_data, local_path

KEY = "model.name_or_path"


def check_base(finished: Finished) -> None:
    """Raise Refused where the base here is not the one that the run was trained on, or where it is not here at all.

    The Hub is never asked for the name of what was a folder: it may be that of somebody else's model. Of a Hub's base
    the commit counts, which the recipe of `finished` names already.
    """
    name, told = finished.recipe.model.name_or_path, _trained_on(finished)
    if told is not None and "@" in told:
        if is_local(name):
            message = f"{name} is a folder here, and the run was trained on {told} of the Hub"
            fix = "Leave --base out" if finished.base else "Go to a folder where nothing has this name"
            raise _refusal(finished, message, fix)
        return
    if told is None and "model_revision" not in finished.summary:
        return  # nothing tells what it was
    if told is None and (finished.summary["model_revision"] is not None and not is_local(name)):
        return
    if not (is_local(name) and local_path(name).is_dir()):
        what = (
            "is no folder"
            if finished.base
            else "was a folder, as seen from where the run was started, and is none here"
        )
        raise _refusal(finished, f"{name} {what}", f"Say where the base is now: {_near(finished)}")
    try:
        here = folder_digest(name)
    except OSError as error:
        raise _refusal(finished, f"{name} cannot be read: {error.strerror}", "") from error
    if told is not None and here != told:
        message = f"{name} is another base than the run was trained on: {here[:12]} here, {told[:12]} there"
        raise _refusal(finished, message, f"Say where that one is: {_near(finished)}")


def check_tokenizer(finished: Finished, tokenizer: Any) -> None:
    """Raise Refused where the base's tokenizer, with the recipe's template on it, is not what the run had.

    Other versions of transformers may write the same tokenizer in another way, so under those it is not compared.
    """
    begun, versions = read_begun(str(finished.folder)), finished.summary.get("versions")
    told = None if begun is None else begun.identity.get("tokenizer")
    same_version = isinstance(versions, dict) and versions.get("transformers") == version("transformers")
    if told is not None and same_version and (here := tokenizer_digest(tokenizer)) != told:
        name = finished.recipe.model.name_or_path
        message = f"{name} has another tokenizer or template than the run had: {here[:12]} here, {told[:12]} there"
        raise _refusal(finished, message, f"Say where the base is as it was: {_near(finished)}")


def has_its_base(finished: Finished) -> bool:
    """Return whether the base that the run was trained on can be had here."""
    try:
        check_base(finished)
    except Refused:
        return False
    return True


def lost_data(finished: Finished) -> list[str]:
    """Return the sources of the run's rows that were files, and are none here; the Hub is not asked for such names."""
    public = finished.summary.get("hub_datasets")
    if not isinstance(public, list):
        return []
    paths = [source.path for source in finished.recipe.data.all_sources()]
    return [path for path in paths if path not in public and not is_local_data(path)]


def base_stops(finished: Finished) -> set[int] | None:
    """Return the ids at which the base by itself ends an answer; None where its settings do not tell, or are gone."""
    if not has_its_base(finished):
        return None
    for name in ("generation_config.json", "config.json"):
        if (path := _file_of_base(finished, name)) is not None:
            with suppress(OSError, ValueError, AttributeError):
                stops = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
                return {stops} if isinstance(stops, int) else set(stops or ()) or None
    return None


def _file_of_base(finished: Finished, name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    model = finished.recipe.model
    if is_local(model.name_or_path):
        path = local_path(model.name_or_path) / name
        return path if path.is_file() else None
    cached = try_to_load_from_cache(model.name_or_path, name, revision=model.revision)
    return Path(cached) if isinstance(cached, str) else None


def _trained_on(finished: Finished) -> str | None:
    """Return what identity.json says of the base: the hash of a folder, or name and commit of the Hub's."""
    begun = read_begun(str(finished.folder))
    told = None if begun is None else begun.identity.get("base model")
    return str(told) if told else None


def _near(finished: Finished) -> str:
    """Return the option to add, with the base's place where it lies as the run folder says."""
    written = str(finished.summary.get("model", ""))
    above = [parent / written for parent in finished.folder.resolve().parents]
    near = [place for place in above if written and place.is_dir()]
    told = _trained_on(finished)
    with suppress(OSError):
        near = [place for place in near if told is None or folder_digest(str(place)) == told]
    return f"--base {shlex.quote(str(near[0])) if near else 'PLACE'}"


def _refusal(finished: Finished, message: str, fix: str) -> Refused:
    where, key = ("--base", "") if finished.base else (finished.recipe.path, KEY)
    return Refused(Problem(message, fix, where, key))
