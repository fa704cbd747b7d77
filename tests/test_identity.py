"""What a result depends on, and what it doesn't: each key of a recipe is one or the other."""

from dataclasses import replace

import pytest

from tunebook.launching.world import World, world_of
from tunebook.plan.plan import build_plan
from tunebook.recipe.reading import load_recipe
from tunebook.recipe.rules import FOLLOW_THE_LOSS
from tunebook.runs.identity import find_differences, find_taken_over, folder_digest, recipe_identity, taken_over

RECIPE = """
model: {name_or_path: a/b, dtype: float32}
lora: {r: 8}
data: {path: a/b, validation: 0.1}
training: {global_batch_size: 8, per_device_train_batch_size: 2}
"""


@pytest.fixture
def recipe_at(tmp_path):
    path = tmp_path / "case.yaml"
    path.write_text(RECIPE)

    def load(*words, world=None):
        recipe = load_recipe(str(path), words)
        return recipe, build_plan(recipe, world or World())

    return load


@pytest.fixture
def identity(recipe_at):
    return lambda *words, world=None: recipe_identity(*recipe_at(*words, world=world))


@pytest.mark.parametrize(
    "words",
    [
        ["training.per_device_train_batch_size=4"],
        ["training.activation_checkpointing=false", "training.logging_steps=1"],
        ["training.save_strategy=epoch", "training.save_total_limit=2", "training.eval_strategy=no"],
        ["training.dataloader_num_workers=2", "training.ddp_timeout=60", "data.answer_rows=0"],
        ["model.base_id=me/b", "data.max_bad_fraction=0.5", "data.packing=true", "data.max_truncated_fraction=0.1"],
        ["data.path=null", "data.sources=[{path: org/rows}]"],  # the fingerprint of the rows says what they are
        ["training.weight_decay=0.0", "training.seed=42", "lora.lora_dropout=0.0"],  # the defaults, written out
    ],
)
def test_what_changes_no_result_makes_no_difference(identity, words):
    assert find_differences(identity(), identity(*words), "runs/case") == []
    assert identity() == identity(world=world_of(4))


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("training.weight_decay=0.1", "training.weight_decay"),
        ("training.seed=1", "training.seed"),
        ("training.lr_scheduler_type=cosine", "training.lr_scheduler_type"),
        ("training.warmup_steps=5", "training.warmup_steps"),
        ("training.max_grad_norm=0.5", "training.max_grad_norm"),
        ("lora.r=4", "lora.r"),
        ("lora.use_dora=true", "lora.use_dora"),
        ("data.validation=0.2", "data.validation"),
        ("data.on_overflow=drop", "data.on_overflow"),
        ("model.attn_implementation=eager", "model.attn_implementation"),
    ],
)
def test_what_changes_the_result_is_named(identity, word, key):
    problems = find_differences(identity(), identity(word), "runs/case")
    assert key in {problem.key for problem in problems}
    assert all("runs/case" in problem.message for problem in problems)


def test_the_best_model_makes_the_moments_of_measuring_count(identity):
    best = ["training.load_best_model_at_end=true", "training.eval_strategy=steps", "training.save_strategy=steps"]
    every = ["training.eval_steps=5", "training.save_steps=5"]
    other = ["training.eval_steps=4", "training.save_steps=4"]
    keys = {problem.key for problem in find_differences(identity(*best, *every), identity(*best, *other), "x")}
    assert keys == {"training.eval_steps", "training.save_steps"}


@pytest.mark.parametrize("schedule", FOLLOW_THE_LOSS)
def test_a_rate_that_follows_the_held_out_loss_makes_the_moments_of_measuring_count(recipe_at, schedule):
    follows = [f"training.lr_scheduler_type={schedule}", "training.eval_strategy=steps"]
    begun, now = (recipe_at(*follows, f"training.eval_steps={steps}") for steps in (5, 4))
    assert [one.key for one in find_differences(recipe_identity(*begun), recipe_identity(*now), "x")] == [
        "training.eval_steps"
    ]
    assert "training.eval_steps" not in taken_over(*begun), "what is refused is not announced as harmless"


def test_contents_are_compared_where_both_know_them(identity):
    full = {**identity(), "data": "one", "tokenizer": "t", "base model": "b"}
    assert find_differences(full, identity(), "x") == []
    assert [problem.key for problem in find_differences(full, {**full, "data": "two"}, "x")] == ["data"]


def test_a_base_is_known_by_its_weights_wherever_it_stands(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(bytes(range(256)) * 2000)
    one = folder_digest(str(tmp_path / "one"))
    assert folder_digest(str(tmp_path / "two")) == one
    with (tmp_path / "two" / "model.safetensors").open("r+b") as file:
        file.seek(100_003)
        file.write(b"\x00")
    assert folder_digest(str(tmp_path / "two")) != one
    assert folder_digest(str(tmp_path / "one")) == one


def test_a_base_that_was_read_once_is_not_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tunebook.data.cache._SETTLED_SECONDS", -1)  # as if the file were old
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    digest = folder_digest(str(tmp_path))
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("read again"))
    assert folder_digest(str(tmp_path)) == digest


def test_what_draws_random_numbers_is_taken_over_with_other_words():
    begun, now = {"processes": 1, "training.save_steps": 5}, {"processes": 2, "training.save_steps": 6}
    processes, steps = find_taken_over(begun, now, ["lora.lora_dropout 0.1"])
    assert processes == "processes: 2, was 1; from here on lora.lora_dropout 0.1 draws other numbers"
    assert steps == "training.save_steps: 6, was 5; it does not change the result"
    assert find_taken_over(begun, now, [])[0] == "processes: 2, was 1; it does not change the result"


def test_what_may_differ_is_listed_for_the_announcement(tmp_path):
    path = tmp_path / "case.yaml"
    path.write_text(RECIPE)
    recipe = load_recipe(str(path), ["training.save_steps=7"])
    plan = build_plan(recipe, World())
    assert taken_over(recipe, plan)["training.save_steps"] == 7
    assert taken_over(recipe, replace(plan, world_size=2))["processes"] == 2
