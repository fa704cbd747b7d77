"""What is chosen, said and refused of a model's attention and positions."""

from dataclasses import replace

import pytest

from tiny_data import build_recipe
from tunebook.model.attention import attention_notes, caps_scores, check_attention, check_rope

GEMMA2 = {"model_type": "gemma2", "attn_logit_softcapping": 50.0}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 100}


def recipe_with(attention=None, **arguments):
    recipe = build_recipe("rows.jsonl", max_length=200)
    model = recipe.model.model_copy(update={"attn_implementation": attention})
    return replace(recipe, model=model, arguments=arguments)


@pytest.mark.parametrize(
    ("config", "caps"),
    [
        (GEMMA2, True),
        ({"model_type": "gemma2"}, True),
        ({**GEMMA2, "attn_logit_softcapping": None}, False),
        ({"model_type": "qwen2"}, False),
        ({}, False),
    ],
)
def test_a_model_that_caps_its_scores_is_known_by_its_config(config, caps):
    assert caps_scores(config) is caps
    assert bool(attention_notes(recipe_with(), config)) is caps
    assert bool(check_attention(recipe_with("sdpa"), config)) is caps


@pytest.mark.parametrize("attention", ["eager", "flash_attention_2", "flex_attention"])
def test_an_attention_that_can_cap_is_taken_and_needs_no_words(attention):
    assert not check_attention(recipe_with(attention), GEMMA2)
    assert not attention_notes(recipe_with(attention), GEMMA2)


def test_a_model_that_nobody_has_seen_is_left_alone():
    assert not check_attention(recipe_with("sdpa"), None) and not attention_notes(recipe_with(), None)


def test_long_rope_takes_long_rows_only_where_each_is_alone():
    [problem] = check_rope(recipe_with(), LONG, 150, 4)
    assert problem.key == "data.max_length" and "rows of 150 tokens" in problem.message
    assert "Set data.max_length: 100" in problem.fix
    assert check_rope(recipe_with(per_device_eval_batch_size=8), LONG, 150, 1)
    assert not check_rope(recipe_with(), LONG, 150, 1)
    assert not check_rope(recipe_with(), LONG, 100, 4)
    assert not check_rope(recipe_with(), {**LONG, "rope_type": "llama3"}, 150, 4)
    assert not check_rope(recipe_with(), None, 150, 4)


def test_rows_are_no_longer_than_they_are_cut():
    recipe = recipe_with()
    cut = replace(recipe, data=recipe.data.model_copy(update={"max_length": 100}))
    assert not check_rope(cut, LONG, 150, 4)
