"""What is said where the columns of a file are not those of any form, or of several."""

import difflib
from collections.abc import Iterable, Sequence

from tunebook.data.formats import Form, possible_forms
from tunebook.errors import Problem
from tunebook.recipe.schema import FORM_REQUIRED, DataSource

# Names that data sets use for the parts of a row, tried where no column has a similar name.
_OTHER_NAMES = {
    "prompt": ("instruction", "prompt", "question", "query", "user", "problem"),
    "response": ("output", "response", "completion", "answer", "target", "assistant", "solution"),
    "input": ("input", "context"),
    "messages": ("messages", "conversations", "conversation", "dialog", "dialogue", "turns", "chat"),
    "text": ("text", "content", "document"),
}
_SEPARATORS = {";": "semicolon", "\t": "tab", "|": "vertical bar"}


def wrong_columns(columns: Iterable[str], file: str, section: DataSource) -> Problem:
    """Return the problem of a file whose rows never have the columns that their form needs."""
    found = [str(column) for column in columns]
    key = f"{section.key}.format"
    if len(found) == 1 and (separator := next((mark for mark in _SEPARATORS if mark in found[0]), "")):
        message = (
            f"one column was found, {found[0]!r}, so the separator is not the comma but the {_SEPARATORS[separator]}"
        )
        expected = ", ".join(possible_forms(section)[0].required)
        return Problem(f"{message}; {expected} expected", "Write the file with commas", where=file, key=key)
    message = f"columns {', '.join(found[:20]) or '(none)'} found; {_expected(section)}"
    return Problem(message, _fix(found, section), where=file, key=key)


def ambiguous_form(forms: Sequence[Form], file: str, section: DataSource) -> Problem:
    """Return the problem of a file whose columns fit several forms."""
    fitting = " and ".join(f"{form.name} ({', '.join(form.required)})" for form in forms)
    names = " or ".join(dict.fromkeys(form.name for form in forms))
    key = f"{section.key}.format"
    return Problem(f"its columns fit {fitting}", f"Set {key} to {names}", where=file, key=key)


def _expected(section: DataSource) -> str:
    forms = possible_forms(section)
    if section.format != "auto":
        optional = [column for column in forms[0].optional if column in ("input",)]
        wanted = ", ".join(forms[0].required) + (f" and, if wanted, {', '.join(optional)}" if optional else "")
        article = "an" if section.format == "alpaca" else "a"
        return f"{article} {section.format} row has {wanted}"
    listed = dict.fromkeys(f"{', '.join(form.required)} ({form.name})" for form in forms)
    return "a row has " + " or ".join(listed)


def _fix(found: Sequence[str], section: DataSource) -> str:
    """Return the line of the recipe that names the columns which were probably meant."""
    given = section.columns or {}
    if gone := [column for column in given.values() if column not in found]:
        alike = difflib.get_close_matches(gone[0], found, n=1)
        return f"{section.key}.columns names {gone[0]}" + (
            f"; nearest: {alike[0]}" if alike else ", which is not there"
        )
    for parts in (("prompt", "response", "input"), ("messages",), ("text",)):
        if section.format != "auto" and not set(FORM_REQUIRED[section.format]) <= set(parts):
            continue
        meant = {part: near for part in parts if (near := _nearest(part, found))}
        if set(parts) - {"input"} <= meant.keys():
            return (
                f"Name them: {section.key}.columns: {{{', '.join(f'{part}: {name}' for part, name in meant.items())}}}"
            )
    needed = possible_forms(section)[0].required
    return f"Write the rows with {' and '.join(needed)}, or name the columns in {section.key}.columns"


def _nearest(part: str, found: Sequence[str]) -> str | None:
    """Return the column that most likely holds a part of a row, by a known name or one spelt alike."""
    candidates = {column.strip().lower(): column for column in found}
    for name in _OTHER_NAMES[part]:
        if name in candidates:
            return candidates[name]
    for name in _OTHER_NAMES[part]:
        if alike := difflib.get_close_matches(name, candidates, n=1, cutoff=0.75):
            return candidates[alike[0]]
    return None
