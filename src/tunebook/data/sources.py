"""The places of a recipe's rows, opened: files of this machine, data sets of the Hub, or several of both."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from tunebook.data.formats import wanted_columns
from tunebook.data.record import Record
from tunebook.data.records import read_records
from tunebook.errors import Problem, Refused
from tunebook.recipe.schema import DataSection, DataSource
from tunebook.system.places import check_data_path, data_suffix, is_local_data, list_data_files


class Source(Protocol):
    """Rows in a fixed order, in one or more parts (files, or splits of Hub data sets)."""

    @property
    def names(self) -> tuple[str, ...]:
        """The parts as the user knows them."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about the place, one line each."""

    @property
    def sections(self) -> tuple[DataSource, ...]:
        """What the recipe says of each part."""

    def records(self, part: int) -> Iterator[Record]:
        """Yield the records of one part in order; the same ones each time."""

    def content_digest(self) -> str:
        """Return the sha256 of the content of all parts in order, without their names."""


@dataclass(frozen=True)
class FileSource:
    """Local data files in the order they are read."""

    files: tuple[Path, ...]
    section: DataSource
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The files' paths as the recipe has them."""
        return tuple(str(file) for file in self.files)

    @property
    def sections(self) -> tuple[DataSource, ...]:
        """What the recipe says of the place, for each file."""
        return (self.section,) * len(self.files)

    def records(self, part: int) -> Iterator[Record]:
        """Yield the records of one file."""
        return read_records(self.files[part], partial(wanted_columns, section=self.section))

    def content_digest(self) -> str:
        """Return the sha256 of the files' own sha256 in order; the suffix counts, since it says how a file is read."""
        digest = hashlib.sha256()
        for file in self.files:
            with file.open("rb") as content:
                digest.update(data_suffix(file).encode() + hashlib.file_digest(content, "sha256").digest())
        return digest.hexdigest()


@dataclass(frozen=True)
class JoinedSource:
    """Several sources, one after another."""

    members: tuple[Source, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The parts of all members."""
        return tuple(name for member in self.members for name in member.names)

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of all members."""
        return tuple(note for member in self.members for note in member.notes)

    @property
    def sections(self) -> tuple[DataSource, ...]:
        """What the recipe says of each part."""
        return tuple(section for member in self.members for section in member.sections)

    def records(self, part: int) -> Iterator[Record]:
        """Yield the records of one part of one member."""
        for member in self.members:
            if part < len(member.names):
                return member.records(part)
            part -= len(member.names)
        raise AssertionError("no such part")

    def content_digest(self) -> str:
        """Return the sha256 over the members' own, and over how each is read and how much of it is taken."""
        digest = hashlib.sha256()
        for member in self.members:
            section = member.sections[0]
            settings = [section.format, section.columns, section.weight, section.rows]
            digest.update(f"{member.content_digest()} {json.dumps(settings, sort_keys=True)}\n".encode())
        return digest.hexdigest()


def open_source(data: DataSection) -> Source:
    """Return the rows that a recipe names. Raises `Refused` with every problem of their places."""
    sections = data.all_sources()
    problems = [
        replace(problem, key=problem.key.replace("data.", f"{section.key}.", 1))
        for section in sections
        for problem in check_data_path(section.path)
    ]
    if problems:
        raise Refused(problems)
    members = [_open_section(section) for section in sections]
    return members[0] if data.sources is None else JoinedSource(tuple(members))


def _open_section(section: DataSource) -> Source:
    if is_local_data(section.path):
        listing = list_data_files(section.path)
        return FileSource(listing.files, section, listing.notes)
    from tunebook.data.hub import load_hub_source

    return load_hub_source(section)


def source_title(sections: Sequence[DataSource], key: str) -> str:
    """Return the path of the source that the recipe describes at `key`."""
    return next(section.path for section in sections if section.key == key)


def no_rows(name: str, key: str) -> Refused:
    """Return the refusal of a part without any row."""
    return Refused(Problem(f"no rows in {name}", "Give a file with rows", key=f"{key}.path"))
