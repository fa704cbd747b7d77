"""Files of prompts: rows in any form that training reads, answered or not, or a text with one on each line."""

import codecs
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tunebook.data.conversation import Conversation, Fault
from tunebook.data.formats import Form, named_form, parse_row, possible_forms
from tunebook.data.messages import ended_by_answer
from tunebook.data.record import Record, Unreadable, place_of
from tunebook.data.rows import open_part
from tunebook.data.sources import FileSource, Source, no_rows
from tunebook.errors import Problem, Refused
from tunebook.recipe.schema import DataSource
from tunebook.system.places import check_data_path, list_data_files, local_path
from tunebook.using.asking import ANY_ANSWER

SHOWN_BAD_ROWS = 5
SHOWN_ROWS = 100
SHOWN_COLUMNS = 20


class PlacedPrompt(NamedTuple):
    """What is asked, ending with the turn that is to be answered, and where it stands (`prompts.jsonl:3`)."""

    asked: Conversation
    where: str


def read_prompts(path: str, sections: Sequence[DataSource]) -> list[PlacedPrompt]:
    """Return the prompts of a file in order; an answer that a row has is left out.

    `sections` say how the recipe reads its rows (format, columns); a file that has none of these columns is read by its
    own. Raises Refused where the file cannot be read, has no rows, or with the first rows that are no prompts.
    """
    found: list[PlacedPrompt] = []
    problems: list[Problem] = []
    for place, row in _read_rows(path, sections):
        if isinstance(row, Fault):
            problems.append(Problem(row.reason, where=place))
        elif row.is_plain_text:
            problems.append(Problem("a plain text asks for no answer", where=place))
        else:
            found.append(PlacedPrompt(row._replace(messages=row.messages[:-1]), place))
    if problems:
        raise bad_prompts(problems, len(found) + len(problems), path)
    return found


def bad_prompts(problems: Sequence[Problem], num_rows: int, path: str) -> Refused:
    """Return the refusal of a file with unusable prompts: how many, and the first of them."""
    listed = "" if len(problems) <= SHOWN_BAD_ROWS else f" (the first {SHOWN_BAD_ROWS} are listed)"
    message = f"{len(problems)} of {num_rows} prompts can't be used{listed}"
    return Refused([Problem(message, "Mend them; nothing was written", path), *problems[:SHOWN_BAD_ROWS]])


def _read_rows(path: str, sections: Sequence[DataSource]) -> Iterator[tuple[str, Conversation | Fault]]:
    place = local_path(path)
    if place.suffix.lower() == ".txt" and place.is_file():
        yield from _read_lines(place)
        return
    if not place.exists() and not any(character in path for character in "*?["):
        message = "standard input is not read" if path == "-" else "no such file"
        raise Refused(Problem(message, "Name a file of prompts", path))
    if problems := check_data_path(path):
        raise Refused([replace(problem, key="", where="--prompts") for problem in problems])
    files = list_data_files(path).files
    for number in range(len(files)):
        yield from _read_part(files, number, path, sections)


def _read_lines(place: Path) -> Iterator[tuple[str, Conversation | Fault]]:
    """Yield each line of a text as a prompt, blank ones left out."""
    form, is_empty = named_form("prompt_completion"), True
    with place.open("rb") as file:
        for number, line in enumerate(file, start=1):
            content = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip(b"\r\n")
            if not content.strip():
                continue
            is_empty = False
            # Bytes that are not UTF-8 become lone surrogates, and the check of the row reports them.
            text = content.decode("utf-8", "surrogateescape")
            yield place_of(str(place), number, "line"), parse_row({"prompt": text, "completion": ANY_ANSWER}, form)
    if is_empty:
        raise Refused(Problem(f"no prompts in {place}", "Give a file with one on each line", "--prompts"))


def _read_part(
    files: tuple[Path, ...], number: int, path: str, sections: Sequence[DataSource]
) -> Iterator[tuple[str, Conversation | Fault]]:
    """Yield the rows of one file, read as the recipe says or, where that doesn't fit, by its own columns."""
    form, records = _open(files, number, path, sections)
    name, is_empty = str(files[number]), True
    for record in records:
        is_empty = False
        row = _read_record(record, form)
        yield place_of(name, record.number, record.unit), row
    if is_empty:
        raise Refused(replace(no_rows(name, "").problems[0], key="", where="--prompts"))


def _read_record(record: Record, form: Form) -> Conversation | Fault:
    if isinstance(record.value, Unreadable):
        return Fault("", record.value.reason)
    return parse_row(record.value, form)


def _open(
    files: tuple[Path, ...], number: int, path: str, sections: Sequence[DataSource]
) -> tuple[Form, Iterator[Record]]:
    """Return the form and the records of a file, by the first way that fits; the last one is by its own columns."""
    for section in sections:
        way = DataSource.model_validate({"path": path, "format": section.format, "columns": section.columns})
        with suppress(Refused):
            return open_part(_Unanswered(FileSource(files, way)), number)
    own = FileSource(files, DataSource.model_validate({"path": path}))
    try:
        return open_part(_Unanswered(own), number)
    except Refused as refused:
        problems = [_explain(problem, own, number) for problem in refused.problems]
        raise Refused(problems) from refused


def _explain(problem: Problem, source: FileSource, part: int) -> Problem:
    """Return a problem without the keys of a recipe, and with the columns that are there where none of them is ours."""
    if not problem.key.endswith(".format"):
        return replace(problem, key="", where=problem.where or "--prompts")
    rows = (record.value for record in islice(source.records(part), SHOWN_ROWS))
    columns = dict.fromkeys(str(column) for row in rows if isinstance(row, Mapping) for column in row)
    message = f"columns {', '.join(list(columns)[:SHOWN_COLUMNS]) or '(none)'} found"
    return Problem(message, "A prompt stands in one of: instruction, prompt, messages, conversations", problem.where)


@dataclass(frozen=True)
class _Unanswered:
    """Rows that need no answer: one is put in the place of it, so that they are read and checked as those that do."""

    source: Source

    @property
    def names(self) -> tuple[str, ...]:
        return self.source.names

    @property
    def notes(self) -> tuple[str, ...]:
        return self.source.notes

    @property
    def sections(self) -> tuple[DataSource, ...]:
        return self.source.sections

    def records(self, part: int) -> Iterator[Record]:
        forms = possible_forms(self.sections[part])
        for record in self.source.records(part):
            value = _answered(record.value, forms) if isinstance(record.value, Mapping) else record.value
            yield replace(record, value=value)

    def content_digest(self) -> str:
        return self.source.content_digest()


def _answered(record: Mapping[str, Any], forms: Sequence[Form]) -> dict[str, Any]:
    """Return a row with an answer of ours wherever one of the forms looks for it."""
    filled = dict(record)
    for form in forms:
        if "response" in form.columns:
            filled[form.columns["response"]] = ANY_ANSWER
        elif "messages" in form.columns and (turns := record.get(form.columns["messages"])):
            filled[form.columns["messages"]] = ended_by_answer(turns, ANY_ANSWER)
    return filled
