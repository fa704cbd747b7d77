"""Which variants of LoRA are refused while the recipe is read, and why."""

import pytest

from tunebook.errors import Refused
from tunebook.launching.world import world_of
from tunebook.plan.plan import build_plan
from tunebook.recipe.reading import load_recipe

NF4 = "quantization: {load_in_4bit: true}"
EIGHT = "quantization: {load_in_8bit: true}"


def load(tmp_path, lora: str, more: str = "", model: str = ""):
    text = f"model: {{name_or_path: a/b{model}}}\ndata: {{path: c/d}}\nlora: {{{lora}}}\n{more}\n"
    (tmp_path / "case.yaml").write_text(text)
    return load_recipe(str(tmp_path / "case.yaml"))


@pytest.mark.parametrize(
    ("lora", "more", "words"),
    [
        ("init_lora_weights: pissa", NF4, "pissa is made from the base weights, which are quantised"),
        ("init_lora_weights: pissa_niter_4", EIGHT, "pissa_niter_4 is made from the base weights, which are quantised"),
        ("init_lora_weights: olora", NF4, "Remove the quantization section"),
        ("init_lora_weights: mica", NF4, "mica is made from the base weights, which are quantised"),
        ("init_lora_weights: loftq", "", "loftq quantises the base once more, on a GPU alone"),
        ("init_lora_weights: loftq", NF4, "loftq quantises the base once more, on a GPU alone"),
        ("init_lora_weights: eva", "", "eva needs a pass of its own over data"),
        ("init_lora_weights: corda", "", "corda needs a pass of its own over data"),
        ("init_lora_weights: lora_ga", "", "expected true, false"),
        ("init_lora_weights: pisa", "", "Nearest: pissa"),
        ("init_lora_weights: pissa_niter_0", "", "pissa_niter_N"),
        ("init_lora_weights: pissa, use_dora: true", "", "lora.use_dora: pissa changes the base"),
        ("init_lora_weights: pissa, lora_bias: true", "", "lora.lora_bias: has no meaning beside init_lora_weights"),
        ("init_lora_weights: gaussian, lora_bias: true", "", "lora.lora_bias: has no meaning beside"),
        ("use_dora: true, lora_bias: true", "", "lora.lora_bias: DoRA has no bias"),
        ("init_lora_weights: orthogonal, r: 7", "", "lora.r: an orthogonal start needs even ranks"),
        ("init_lora_weights: orthogonal, rank_pattern: {q_proj: 3}", "", "needs even ranks"),
        ("init_lora_weights: mica, use_dora: true", "", "lora.use_dora: mica cannot have it"),
        ("init_lora_weights: mica, target_parameters: [a.b]", "", "lora.target_parameters: mica cannot have it"),
        ("target_parameters: [a.b], use_dora: true", "", "lora.use_dora: target_parameters cannot have DoRA"),
        ("target_parameters: [a.b], lora_dropout: 0.1", "", "lora.lora_dropout: target_parameters cannot"),
        ("use_dora: true", EIGHT, "DoRA on an 8-bit base stops at the first step. Use load_in_4bit: true"),
    ],
)
def test_what_cannot_train_says_why_not(tmp_path, lora, more, words):
    with pytest.raises(Refused) as refused:
        load(tmp_path, lora, more)
    report = refused.value.render()
    assert words in report and "case.yaml:" in report


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ("trainable_token_indices: []", "lora.trainable_token_indices: is empty"),
        ("trainable_token_indices: {}", "lora.trainable_token_indices: is empty"),
        ("trainable_token_indices: {embed_tokens: []}", "lora.trainable_token_indices: is empty"),
        ("trainable_token_indices: {embed_tokens: [1], lm_head: 2}", "got 2, expected a list of token ids"),
        ("trainable_token_indices: [5, 6, 5]", "names 5 twice"),
        ("target_modules: [q_proj], layers_to_transform: []", "lora.layers_to_transform: is empty"),
        ("target_modules: [q_proj], layers_to_transform: [0], layers_pattern: []", "lora.layers_pattern: is empty"),
        ("target_modules: [q_proj], layers_to_transform: [0], layers_pattern: ''", "lora.layers_pattern: is empty"),
        ("target_modules: [q_proj], layers_to_transform: [0], layers_pattern: 'a('", "is no regular expression"),
        (
            "target_modules: [q_proj], target_parameters: [up.weight], layers_to_transform: [0]",
            "lora.layers_to_transform: has no effect on target_parameters",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(tmp_path, lora, words):
    with pytest.raises(Refused) as refused:
        load(tmp_path, lora)
    assert words in refused.value.render()


def test_an_empty_text_is_called_empty(tmp_path):
    with pytest.raises(Refused, match=r"data.path: is empty; name something"):
        (tmp_path / "case.yaml").write_text("model: {name_or_path: a/b}\ndata: {path: ''}\nlora: {}\n")
        load_recipe(str(tmp_path / "case.yaml"))


@pytest.mark.parametrize(
    "start", ["true", "false", "gaussian", "orthogonal", "pissa", "pissa_niter_16", "olora", "mica"]
)
def test_what_can_train_is_taken(tmp_path, start):
    assert load(tmp_path, f"init_lora_weights: {start}").lora is not None
    assert load(tmp_path, "use_dora: true, use_rslora: true", NF4).lora is not None


@pytest.mark.parametrize(
    ("model", "lora", "words"),
    [
        ("add_special_tokens: [' ']", "", "the text ' ' is no token"),
        ("add_special_tokens: [a, b, a]", "", "a is named twice"),
        ("add_special_tokens: []", "", "add_special_tokens: is empty; name something, or remove it"),
        ("add_special_tokens: [1]", "", "expected a list of text"),
        ("add_special_tokens: [a]", "trainable_token_indices: [3]", "is given beside model.add_special_tokens"),
    ],
)
def test_new_tokens_are_checked_while_the_recipe_is_read(tmp_path, model, lora, words):
    with pytest.raises(Refused) as refused:
        load(tmp_path, lora, model=f", {model}")
    assert words in refused.value.render()


def test_new_tokens_are_part_of_the_recipe(tmp_path):
    recipe = load(tmp_path, "", model=", add_special_tokens: ['<|tool|>']")
    assert recipe.model.add_special_tokens == ["<|tool|>"]
    assert recipe.resolved["model"]["add_special_tokens"] == ["<|tool|>"]


def test_float16_on_a_cpu_is_refused(tmp_path):
    with pytest.raises(Refused, match=r"model.dtype: float16 .* does not train on a CPU. Set model.dtype: float32"):
        build_plan(load(tmp_path, "", model=", dtype: float16"), world_of(1, "cpu"))
    assert build_plan(load(tmp_path, "", model=", dtype: float16"), world_of(1, "cuda")).compute_dtype == "float16"
