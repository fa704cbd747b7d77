"""What draws random numbers is known from recipe and base, before anything is loaded."""

import json

import pytest

from tunebook.launching.world import World
from tunebook.plan.plan import build_plan
from tunebook.plan.randomness import random_settings
from tunebook.recipe.reading import load_recipe


@pytest.fixture
def recipe_of(tmp_path):
    def build(config, *words):
        (tmp_path / "base").mkdir(exist_ok=True)
        (tmp_path / "base" / "config.json").write_text(json.dumps(config))
        path = tmp_path / "mine.yaml"
        path.write_text(f"model: {{name_or_path: {tmp_path / 'base'}}}\nlora: {{r: 4}}\ndata: {{path: a/b}}\n")
        return load_recipe(str(path), words)

    return build


@pytest.mark.parametrize(
    ("config", "words", "found"),
    [
        ({}, ["lora.lora_dropout=0.1"], ["lora.lora_dropout 0.1"]),
        ({}, ["training.neftune_noise_alpha=5"], ["training.neftune_noise_alpha 5"]),
        ({"attention_dropout": 0.3}, [], ["attention_dropout 0.3 of the base's config.json"]),
        ({"resid_pdrop": 0.1, "embd_pdrop": 0.0}, [], ["resid_pdrop 0.1 of the base's config.json"]),
        ({"text_config": {"hidden_dropout_prob": 0.1}}, [], ["hidden_dropout_prob 0.1 of the base's config.json"]),
        ({"attention_dropout": 0.0, "classifier_dropout": 0.1, "hidden_size": 8}, [], []),
    ],
)
def test_each_kind_is_named_and_noted_in_the_plan(recipe_of, config, words, found):
    recipe = recipe_of(config, *words)
    assert list(random_settings(recipe)) == found
    notes = [note for note in build_plan(recipe, World()).notes if "the adapter depends on" in note]
    assert len(notes) == bool(found) and all(one in notes[0] for one in found)
