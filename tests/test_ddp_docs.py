"""docs/ddp.md keeps its word: every file, function and test that it names exists."""

import ast
import re

import pytest

from checkout import ROOT

DOCS = (ROOT / "docs" / "ddp.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`((?:src/|tests/|train_ddp)[\w/.]*\.py(?:::[\w.:]+)?)`", DOCS)))


def test_the_text_names_what_does_each_idea_and_what_shows_it():
    ideas = [section for section in DOCS.split("\n## ")[1:] if not section.startswith("What rounding")]
    assert len(ideas) >= 10
    for idea in ideas:
        assert "does it:" in idea and "shows it:" in idea, idea.splitlines()[0]
    assert len(NAMED) >= 30
    assert DOCS.count("Where the usual account is wrong") == 5


@pytest.mark.parametrize("named", NAMED)
def test_what_is_named_exists(named):
    path, _, inside = named.partition("::")
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    for name in re.split(r"::|\.", inside) if inside else ():
        definitions = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name]
        assert definitions, f"{name} is not in {path}"
        body = definitions[0].body
