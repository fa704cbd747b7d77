"""The form of a row: which columns it has, and what makes one unusable."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tunebook.errors import Problem

ALPACA_REQUIRED = ("instruction", "output")
ALPACA_OPTIONAL = ("input",)
# Names that other data sets use for the same thing, tried where no column has a similar name.
_OTHER_NAMES = {
    "instruction": ("prompt", "question", "query", "user"),
    "output": ("response", "answer", "completion", "target", "assistant"),
    "input": ("context",),
}
_SHOWN_CHARS = 40


class AlpacaRow(NamedTuple):
    """One usable Alpaca row; `input` is empty where the row has none."""

    instruction: str
    input: str
    output: str

    @property
    def question(self) -> str:
        """What the user says: the instruction, and the input after a blank line if there is one."""
        return f"{self.instruction}\n\n{self.input}" if self.input else self.instruction


class Fault(NamedTuple):
    """Why a record is no usable row; `field` names the columns concerned and is empty for the record as a whole."""

    field: str
    reason: str


def parse_alpaca(value: Any) -> AlpacaRow | Fault:
    """Return the row that a decoded record stands for, or what is wrong with it (every field, not only the first).

    `instruction` and `output` must be text that is not blank. `input` may be absent, null or blank: all mean none.
    """
    if not isinstance(value, Mapping):
        return Fault("", f"an object with {', '.join(ALPACA_REQUIRED)} expected, got {_kind(value)}")
    instruction: Any = value.get("instruction")
    output: Any = value.get("output")
    given_input: Any = value.get("input")
    if given_input is None or (isinstance(given_input, str) and not given_input.strip()):
        given_input = ""
    faults = [
        Fault(field, reason)
        for field, content, required in (
            ("instruction", instruction, True),
            ("input", given_input, False),
            ("output", output, True),
        )
        if (reason := _text_fault(value, field, content, required))
    ]
    if faults:
        return Fault(", ".join(fault.field for fault in faults), "; ".join(fault.reason for fault in faults))
    return AlpacaRow(instruction, given_input, output)


def _text_fault(record: Mapping[str, Any], field: str, content: Any, required: bool) -> str:
    """Return what is wrong with one field, or an empty string."""
    if not isinstance(content, str):
        if content is None:
            return f"{field} is null" if field in record else f"{field} is missing"
        return f"{field} is {_kind(content)}, text expected"
    if required and not content.strip():
        return f"{field} is blank" if content else f"{field} is empty"
    if not content.isascii():
        try:
            content.encode("utf-8")
        except UnicodeEncodeError as error:
            return f"{field} has a lone surrogate or bytes that are not UTF-8 (character {error.start + 1})"
    return ""


def _kind(value: Any) -> str:
    """Return the JSON kind of a value, with the value where it is short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the text {value[:_SHOWN_CHARS]!r}"
    if isinstance(value, int | float):
        return f"the number {str(value)[:_SHOWN_CHARS]}"
    if isinstance(value, list | tuple):
        return "a list"
    return "an object" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def find_wrong_columns(columns: Iterable[str], file: str) -> Problem | None:
    """Return the problem of a file whose rows never have a required column, given every column that was seen."""
    found = [str(column) for column in columns]
    missing = [name for name in ALPACA_REQUIRED if name not in found]
    if not missing:
        return None
    expected = f"{', '.join(ALPACA_REQUIRED)} and, if wanted, {', '.join(ALPACA_OPTIONAL)}"
    message = f"columns {', '.join(found[:20]) or '(none)'} found; an alpaca row has {expected}"
    renamed = [(near, name) for name in (*missing, *_absent_optional(found)) if (near := _nearest(name, found))]
    if renamed:
        fix = "Rename " + ", ".join(f"{near} to {name}" for near, name in renamed)
    else:
        fix = f"Write the rows with {' and '.join(ALPACA_REQUIRED)}"
    return Problem(message, fix, where=file, key="data.format")


def _absent_optional(found: list[str]) -> list[str]:
    return [name for name in ALPACA_OPTIONAL if name not in found]


def _nearest(name: str, found: list[str]) -> str | None:
    """Return the column that most likely was meant by `name`: by spelling first, then by a known other name."""
    known_names = (*ALPACA_REQUIRED, *ALPACA_OPTIONAL)
    candidates = {column.strip().lower(): column for column in found if column not in known_names}
    near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.75)
    known = [other for other in _OTHER_NAMES[name] if other in candidates]
    return candidates[(near or known)[0]] if near or known else None
