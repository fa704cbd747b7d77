"""What is chosen, said and refused of a model's attention and positions."""

from dataclasses import replace

import pytest

from tiny_data import build_recipe
from tunebook.model.attention import (
    attention_notes,
    caps_scores,
    check_attention,
    check_rope,
    kept_for_attention,
    spares_masks,
)
from tunebook.model.shapes import build_shape, find_shape

GEMMA2 = {"model_type": "gemma2", "attn_logit_softcapping": 50.0}
SHAPE = {
    "model_type": "qwen2", "hidden_size": 224, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
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


def test_where_sdpa_has_no_kernel_for_shared_keys_it_gets_its_mask():
    """All scores would be made: for float32, and on GPUs without bfloat16."""
    assert [spares_masks(True, "cuda", dtype) for dtype in ("float32", "float16", "bfloat16")] == [False, False, True]
    assert spares_masks(False, "cuda", "float32") and spares_masks(True, "cpu", "float32")
    shape = build_shape({**SHAPE, "num_key_value_heads": 2}, "")
    assert shape.shares_keys and kept_for_attention("sdpa", shape, 100, spared=False) == (True, True)
    assert not build_shape(SHAPE, "").shares_keys


def test_what_no_cpu_can_show_of_attention():
    """Neither runs here: flash attention takes rows as they are, and flex repeats keys for some numbers of heads."""
    shapes = {heads: build_shape({**SHAPE, "num_attention_heads": heads}, "") for heads in (4, 28)}
    for joined in (False, True):
        for flash in ("flash_attention_2", "flash_attention_3"):
            assert kept_for_attention(flash, shapes[28], 100, joined=joined) == (False, False)
        assert kept_for_attention("flex_attention", shapes[4], 100, joined=joined) == (False, False)
        assert kept_for_attention("flex_attention", shapes[28], 100, joined=joined) == (False, True)


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"model_type": "llama"}, None),
        ({"model_type": "mistral"}, 4096),  # what transformers takes where nothing is written
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "phi3", "sliding_window": 2047}, 2047),
        ({"model_type": "qwen2", "sliding_window": 100, "use_sliding_window": False}, None),
        ({"model_type": "qwen3", "sliding_window": 100, "use_sliding_window": True}, 100),
    ],
)
def test_the_window_of_a_model_is_that_of_its_config(config, window):
    assert build_shape({**SHAPE, **config}, "").window == window


def test_mistral_of_the_shipped_recipe_has_no_window():
    assert find_shape("mistralai/Mistral-7B-v0.3").window is None
