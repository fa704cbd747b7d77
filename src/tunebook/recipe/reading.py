"""Reading a recipe: everything that can be wrong with it is found at once, before anything heavy is imported."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from tunebook.errors import Problem, Refused
from tunebook.recipe.contradictions import PRECISION, find_contradictions
from tunebook.recipe.data_checks import read_sources
from tunebook.recipe.names import (
    OWN,
    REQUIRED,
    SECTIONS,
    Explained,
    explain_unknown_key,
    explain_unknown_section,
    known_keys,
)
from tunebook.recipe.rules import RANGES
from tunebook.recipe.schema import BatchSection, DataSection, HubSection, ModelSection, Recipe
from tunebook.recipe.source import Source, read_source
from tunebook.recipe.values import WrongValue, read_value, shown
from tunebook.system.places import check_data_path, check_model_path

CHECKPOINTING_ALIASES = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}


def load_recipe(path: str, overrides: Sequence[str] = (), was_run: bool = False) -> Recipe:
    """Read a recipe file and the `section.key=value` overrides laid over it.

    `was_run` is for the recipe in a run folder, which was accepted then: what came out can be used when its data is
    gone, or something else stands at its places.

    Raises Refused with every problem found, in the order of the text: unknown, duplicate and missing keys, wrong types,
    values out of range, keys that break a promise, contradictions, models and data that are not where they should be.
    """
    source = read_source(path, overrides)
    sections = _read_sections(source)
    notes = _take_aliases(source, sections)
    if not was_run:
        source.problems += find_contradictions(sections, source)
        source.problems += _find_missing_places(sections, source)
    notes += _take_precision(sections)
    if source.problems:
        raise Refused(sorted(source.problems, key=lambda problem: _text_order(problem, path)))
    own = {name: kind(**_own_part(sections.get(name), kind)) for name, kind in OWN.items() if name != "hub"}
    model, data, batch = own["model"], own["data"], own["training"]
    assert isinstance(model, ModelSection) and isinstance(data, DataSection) and isinstance(batch, BatchSection)
    training = sections.get("training") or {}
    hub = None if sections.get("hub") is None else HubSection(**sections["hub"] or {})
    return Recipe(
        path=path,
        stem=Path(path).stem,
        model=model,
        data=data,
        batch=batch,
        arguments={name: value for name, value in training.items() if name not in BatchSection.model_fields},
        quantization=sections.get("quantization"),
        lora=sections.get("lora"),
        resolved=_resolved(sections, model, data),
        overridden=frozenset(source.overridden),
        places=dict(source.places),
        notes=tuple(notes + ([] if hub is None else [f"the run is published as {hub.repo} when it has ended"])),
        hub=hub,
    )


@contextmanager
def placed_in(recipe: Recipe) -> Iterator[None]:
    """Give each problem found inside the line of the recipe's key that it names, where it names no other place."""
    try:
        yield
    except Refused as refused:
        problems = [_placed(problem, recipe) for problem in refused.problems]
        raise Refused(problems) from refused


def _placed(problem: Problem, recipe: Recipe) -> Problem:
    if not problem.key or problem.where not in ("", recipe.path):
        return problem
    return replace(problem, where=recipe.places.get(problem.key, recipe.path))


def _text_order(problem: Problem, path: str) -> tuple[int, int]:
    line = problem.where.removeprefix(f"{path}:")
    if problem.where.startswith(path):
        return (0, int(line) if line.isdigit() else 0)
    return (1, 0)


def _read_sections(source: Source) -> dict[str, dict[str, Any] | None]:
    sections: dict[str, dict[str, Any] | None] = {}
    for name, value in source.values.items():
        if name not in SECTIONS:
            _add_unknown(source, name, explain_unknown_section(name))
        elif name in source.blank:
            fix = (
                f"Write `{name}: {{}}` for its defaults, or remove the line"
                if name == "lora"
                else "Fill it or remove it"
            )
            _add(source, name, "the section is empty", fix)
        elif value is None:
            sections[name] = None
        elif isinstance(value, dict):
            sections[name] = _read_section(name, value, source)
        else:
            _add(source, name, f"got {shown(value)}, expected a section", "Write `key: value` lines below it")
    if source.values or not source.problems:
        for name, key in REQUIRED.items():
            if name == "hub" and not isinstance(source.values.get("hub"), dict):
                continue  # a recipe need not publish
            if not _written(source, name, key) and not {name, f"{name}.{key}"} & source.undecided:
                fix = "A recipe names its model and its data" if name == "model" else "Write owner/name"
                _add(source, f"{name}.{key}", "is missing", fix)
    return sections


def _written(source: Source, section: str, key: str) -> bool:
    value = source.values.get(section)
    return isinstance(value, dict) and value.get(key) is not None


def _read_section(section: str, written: dict[str, Any], source: Source) -> dict[str, Any]:
    known = known_keys(section)
    read: dict[str, Any] = {}
    for name, value in written.items():
        key = f"{section}.{name}"
        if key in source.undecided:  # how it is written is wrong, which is reported
            continue
        if name not in known:
            _add_unknown(source, key, explain_unknown_key(section, name))
            continue
        if key == "data.sources" and value is not None:
            read[name] = read_sources(value, partial(_add, source))
            continue
        try:
            read[name] = read_value(value, known[name])
            _check_range(section, name, read[name])
        except WrongValue as error:
            read.pop(name, None)
            if not (value is None and REQUIRED.get(section) == name):
                _add(source, key, str(error))
    return read


def _check_range(section: str, name: str, value: Any) -> None:
    field = OWN[section].model_fields.get(name) if section in OWN else None
    if field is not None and field.metadata:
        try:
            constrained: Any = Annotated[(field.annotation, *field.metadata)]
            TypeAdapter(constrained).validate_python(value)
        except ValidationError as error:
            if value in ([], ""):
                raise WrongValue("is empty; name something, or remove it") from error
            allowed = error.errors()[0]["msg"].removeprefix("Input should be ").removeprefix("String should have ")
            raise WrongValue(f"got {shown(value)}, expected a value {allowed}") from error
    low, high, allowed = RANGES.get(f"{section}.{name}", (None, None, ""))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if (low is not None and value < low) or (high is not None and value > high):
        raise WrongValue(f"got {shown(value)}, expected a number {allowed}")


def _find_missing_places(sections: dict[str, dict[str, Any] | None], source: Source) -> list[Problem]:
    """Return why the model or the data cannot be where the recipe says, as far as names and folders tell."""
    problems = []
    model, data = sections.get("model") or {}, sections.get("data") or {}
    places: list[tuple[str, str | None, Callable[[str], list[Problem]]]] = [
        ("model.name_or_path", model.get("name_or_path"), check_model_path)
    ]
    places += [("data.path", data.get("path"), check_data_path)]
    for number, entry in enumerate(data.get("sources") or []):
        places += [(f"data.sources[{number}].path", entry.get("path"), check_data_path)]
    for key, place, check in places:
        if place is not None and key not in source.undecided:
            problems += [replace(problem, where=source.place(key), key=key) for problem in check(place)]
    return problems


def _take_aliases(source: Source, sections: dict[str, dict[str, Any] | None]) -> list[str]:
    """Give the checkpointing keys the one name that stays; a deprecated name is taken with a note."""
    training = sections.get("training") or {}
    notes = []
    for old, new in CHECKPOINTING_ALIASES.items():
        if old not in training:
            continue
        if new in training and training[new] != training[old]:
            _add(source, f"training.{old}", f"contradicts {new}: {shown(training[new])}", f"Keep {new}")
        value = training.pop(old)
        training.setdefault(new, value)
        if f"training.{old}" in source.overridden:
            source.overridden.add(f"training.{new}")
        notes.append(f"training.{old} is deprecated in transformers; it is read as training.{new}")
    return notes


def _take_precision(sections: dict[str, dict[str, Any] | None]) -> list[str]:
    """Read `bf16: true` or `fp16: true` as the model.dtype it means, where the recipe gives none."""
    model, training = sections.get("model") or {}, sections.get("training") or {}
    notes = []
    for flag, dtype in PRECISION.items():
        if training.get(flag) and model.get("dtype", "auto") == "auto":
            model["dtype"] = dtype
            notes.append(f"training.{flag} is read as model.dtype: {dtype}")
    return notes


def _own_part(section: dict[str, Any] | None, kind: type) -> dict[str, Any]:
    return {name: value for name, value in (section or {}).items() if name in kind.model_fields}  # type: ignore[attr-defined]


def _resolved(sections: dict[str, dict[str, Any] | None], model: ModelSection, data: DataSection) -> dict[str, Any]:
    """Return the recipe as it stands after overrides, with tunebook's own defaults written out."""
    # Without held-out rows there is nothing to answer, and the number would contradict that.
    left_out = set() if data.validation else {"answer_rows"}
    left_out |= {"split"} - data.model_fields_set  # and a split has no effect on local files
    full = {
        "model": model.model_dump(exclude_none=True),
        "quantization": sections.get("quantization"),
        "lora": sections.get("lora"),
        "data": _written_data(data, left_out),
        "training": sections.get("training") or {},
        "hub": sections.get("hub"),
    }
    return {name: section for name, section in full.items() if section is not None}


def _written_data(data: DataSection, left_out: set[str]) -> dict[str, Any]:
    """Return the section with its defaults, and the sources as they were written."""
    if data.sources is None:
        return data.model_dump(exclude_none=True, exclude=left_out)
    written: dict[str, Any] = data.model_dump(exclude_none=True, exclude=left_out | {"split"})
    return written | {"sources": [source.model_dump(exclude_unset=True) for source in data.sources]}


def _add_unknown(source: Source, key: str, explained: Explained) -> None:
    _add(source, key, explained.message, explained.fix)
    source.undecided.add(explained.meant)


def _add(source: Source, key: str, message: str, fix: str = "") -> None:
    source.problems.append(Problem(message, fix, source.place(key), key))
    source.undecided.add(key)


def write_resolved(recipe: Recipe, path: Path) -> None:
    """Write the resolved recipe as YAML that `load_recipe` reads back to the same recipe."""
    from ruamel.yaml import YAML

    writer = YAML()
    writer.default_flow_style = False
    with path.open("w", encoding="utf-8") as file:
        file.write(f"# {recipe.path}, as it was run.\n")
        writer.dump(dict(recipe.resolved), file)
