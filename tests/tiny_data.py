"""What the tests of data share: a recipe around a path, rows written to a file, and where other material lies."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tunebook.recipe.schema import BatchSection, DataSection, ModelSection, Recipe

CASES = Path(__file__).parent / "cases"
SHARED = Path(__file__).parents[2] / "shared"


def build_recipe(path: Path | str, seed: int = 0, **data: Any) -> Recipe:
    """Return a recipe whose data section has `path` and what else is given; the model plays no part."""
    return Recipe(
        path="case.yaml",
        stem="case",
        model=ModelSection(name_or_path="./tiny"),
        data=DataSection(path=str(path), **data),
        batch=BatchSection(),
        arguments={"seed": seed},
        quantization=None,
        lora=None,
        resolved={},
    )


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """Write one JSON value per line and return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def shared(*parts: str) -> Path:
    """Return a path under ../shared, or skip the test where this checkout stands alone."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    return path
