"""The licence of a base: read from whatever its card holds, and asked for with a word on what for."""

import logging
from dataclasses import replace

import pytest

from tiny_training import build_recipe
from tunebook.card.licence import find_licence


@pytest.mark.parametrize(
    "fields",
    [
        "date: 2024-99-99",
        "date: 2024-01-01T99:00:00",
        "a: &a {x: *a}",
        "x: " + "[" * 500,
        "x: !!python/object:os.system {}",
        "x: !!int many",
        "x: 1\nx: 2",
        "? {a: 1}\n: 2",
        "\t- x",
        "x: *unknown",
        "- 1",
    ],
)
def test_a_card_that_nobody_can_read_names_no_licence(tmp_path, fields):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text(f"---\nlicense: mit\n{fields}\n---\n")
    found = find_licence(build_recipe(str(tmp_path)), None)
    assert found is None or found.ids == ("mit",)
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    [known] = find_licence(build_recipe(str(tmp_path)), None).ids
    assert known == "mit"


def test_what_the_hub_is_asked_for_is_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.delenv("RANK", raising=False)

    def ask(name, revision):
        logging.getLogger("huggingface_hub.utils._http").warning("'no name' thrown while requesting HEAD https://h/x")

    monkeypatch.setattr("tunebook.card.licence._find_card", ask)
    recipe = build_recipe(str(tmp_path))
    model = recipe.model.model_copy(update={"base_id": "org/tiny"})
    assert find_licence(replace(recipe, model=model), None) is None
    said = "the Hub, asked for the licence of org/tiny: it does not answer ('no name'); trying again, for 10 seconds"
    assert said in capsys.readouterr().err
