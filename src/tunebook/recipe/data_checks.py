"""What is wrong with the data section beyond the types of its keys: sources, columns and templates."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunebook.recipe.checking import Report, Sections
from tunebook.recipe.schema import FORM_COLUMNS, FORM_REQUIRED, SourceSection
from tunebook.recipe.values import WrongValue, nearest_word, read_value
from tunebook.system.places import is_local_data
from tunebook.system.spelling import near_words

TEMPLATE_WORDS = ("auto", "alpaca", "chatml")
TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2")
PARTS = tuple(dict.fromkeys(part for columns in FORM_COLUMNS.values() for part in columns))


def read_sources(value: Any, report: Report) -> list[dict[str, Any]]:
    """Return the entries of `data.sources` with their values as the keys take them; whatever is wrong is reported."""
    if not isinstance(value, list) or not value:
        report("data.sources", "expected a list of places", "Write `- path: ...` lines below it")
        return []
    entries = []
    for number, entry in enumerate(value):
        key = f"data.sources[{number}]"
        if not isinstance(entry, dict):
            report(key, "expected a place with its keys", "Write `- path: ...`")
            continue
        entries.append(_read_entry(entry, key, report))
    return entries


def _read_entry(entry: Mapping[str, Any], key: str, report: Report) -> dict[str, Any]:
    fields = SourceSection.model_fields
    read: dict[str, Any] = {}
    for name, value in entry.items():
        if name not in fields:
            near = near_words(name, list(fields), n=1)
            report(f"{key}.{name}", "unknown key", f"Nearest: {near[0]}" if near else f"Keys are {', '.join(fields)}")
            continue
        try:
            read[name] = read_value(value, fields[name].annotation)
        except WrongValue as error:
            report(f"{key}.{name}", str(error), "")
    if "path" not in entry:
        report(f"{key}.path", "is missing", "Each source names its place")
    for name, lowest in (("weight", 0), ("rows", 1)):
        number = read.get(name)
        if number is not None and (number < lowest or number == 0 or number > 1e9):
            report(f"{key}.{name}", f"got {number:g}, expected a number above 0", "")
            del read[name]
    if read.get("rows") is not None and "weight" in read:
        report(f"{key}.rows", "is given beside weight", "Keep one of them")
    return read


def check_sources(sections: Sections, report: Report) -> None:
    """Report what can't stand beside `data.sources`, and keys of a source that have no effect on it."""
    sources = sections.get("data.sources")
    if sources is None:
        if sections.get("data.path") is None and sections.sections:  # nothing is asked of a text that is no recipe
            report("data.path", "is missing", "A recipe names its model and its data: set data.path or data.sources")
        return
    if sections.get("data.path") is not None:
        report("data.path", "is given beside sources", "Keep one of them")
    for name in ("revision", "split"):
        if sections.get(f"data.{name}") is not None:
            report(f"data.{name}", "is given beside sources", "Write it into the source it belongs to")
    for number, source in enumerate(sources):
        if "path" in source and is_local_data(source["path"]):
            for name in ("revision", "split"):
                if source.get(name) is not None:
                    report(f"data.sources[{number}].{name}", "has no effect on local files", "Remove it")


def check_columns(sections: Sections, report: Report) -> None:
    """Report parts of a row that no form has, and those that the given form has not."""
    settings = [("data", sections.get("data.format", "auto"), sections.get("data.columns"))]
    for number, source in enumerate(sections.get("data.sources") or []):
        form = source.get("format", settings[0][1])
        settings.append((f"data.sources[{number}]", form, source.get("columns")))
    for key, form, columns in settings:
        known = PARTS if form == "auto" else tuple(FORM_COLUMNS[form])
        for part in columns or {}:
            if part not in known:
                near = near_words(part, known, n=1)
                of = "a row" if form == "auto" else f"the form {form}"
                fix = f"Nearest: {near[0]}" if near else f"Parts are {', '.join(known)}"
                report(f"{key}.columns", f"{part} is no part of {of}", fix)
        if columns is not None and form == "auto" and not _fits_a_form(columns):
            report(
                f"{key}.columns", f"no form has all of {', '.join(columns)}", "Name prompt and response, or messages"
            )


def _fits_a_form(columns: Mapping[str, str]) -> bool:
    unknown = not set(columns) <= set(PARTS)  # reported above
    return unknown or any(set(columns) <= set(own) and FORM_REQUIRED[name] for name, own in FORM_COLUMNS.items())


def check_template(sections: Sections, report: Report) -> None:
    """Report a template that is neither a word we have nor a file that is there."""
    template = sections.get("data.template", "auto")
    if template in TEMPLATE_WORDS:
        return
    if not template.lower().endswith(TEMPLATE_SUFFIXES):
        near = nearest_word(template.lower(), TEMPLATE_WORDS)
        message = f"got {template!r}, expected {', '.join(TEMPLATE_WORDS)} or the path of a .jinja file"
        report("data.template", message, f"Nearest: {near}" if near else "")
    elif not Path(template).expanduser().is_file():
        report("data.template", f"file {template} does not exist", "Correct the path")


DATA_CHECKS = (check_sources, check_columns, check_template)
