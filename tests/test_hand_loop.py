"""What train_ddp.py refuses by name, and that all ranks' failures are said once."""

import pytest

from checkout import ROOT
from tiny_data import write_jsonl
from tunebook.errors import Refused, TrainingFailed
from tunebook.launching.entry import say_failed
from tunebook.recipe.hand_loop import check_hand_loop
from tunebook.recipe.reading import load_recipe


@pytest.fixture
def recipe_of(tmp_path):
    def build(*lines, dtype="float32"):
        path = tmp_path / "mine.yaml"
        training = "".join(f"  {line}\n" for line in ("global_batch_size: 8", *lines))
        data = f"data:\n  path: {write_jsonl(tmp_path / 'rows.jsonl', [{}])}\n  validation: 0.1\n"
        path.write_text(
            f"model:\n  name_or_path: some/model\n  dtype: {dtype}\nlora: {{}}\n{data}training:\n{training}"
        )
        return load_recipe(str(path), ())

    return build


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("optim", "optim: sgd"),
        ("optim", "optim: paged_adamw_8bit"),
        ("neftune_noise_alpha", "neftune_noise_alpha: 5"),
        ("load_best_model_at_end", "load_best_model_at_end: true"),
        ("lr_scheduler_type", "lr_scheduler_type: reduce_lr_on_plateau"),
        ("label_smoothing_factor", "label_smoothing_factor: 0.1"),
        ("save_strategy", "save_strategy: best"),
        ("torch_compile", "torch_compile: true"),
    ],
)
def test_what_the_loop_does_not_do_is_refused_by_name(recipe_of, key, line):
    with pytest.raises(Refused, match=rf"training\.{key}: train_ddp.py does not do .*finetune\.py"):
        check_hand_loop(recipe_of(line))


def test_float16_is_refused_and_all_problems_are_told_together(recipe_of):
    with pytest.raises(Refused, match="3 problems") as refused:
        check_hand_loop(recipe_of("optim: sgd", "neftune_noise_alpha: 5", dtype="float16"))
    assert "model.dtype: float16 needs a scaled loss" in str(refused.value)


@pytest.mark.parametrize(
    "line",
    ["optim: adamw_torch", "save_strategy: epoch", "save_total_limit: 2", "label_smoothing_factor: 0.0", "seed: 3"],
)
def test_what_it_does_or_need_not_do_is_accepted(recipe_of, line):
    check_hand_loop(recipe_of(line))


def test_shipped_recipes_with_the_usual_optimizer_can_be_trained_by_hand():
    recipes = [load_recipe(str(path), ()) for path in sorted((ROOT / "recipes").glob("*.yaml"))]
    others = {recipe.stem for recipe in recipes if "optim" in recipe.arguments}
    assert others == {"qwen7b_full"}, "8-bit states, without which it fits no GPU"
    for recipe in recipes:
        if recipe.stem not in others:
            check_hand_loop(recipe)


def test_a_failure_of_all_ranks_is_said_by_rank_0_alone_and_one_of_a_rank_by_itself(capsys, monkeypatch):
    monkeypatch.setattr("tunebook.launching.entry.SECONDS_FOR_RANK_0", 0.0)
    for rank in (0, 1):
        say_failed(TrainingFailed("the loss became nan"), rank)
    assert capsys.readouterr().err == "failed: the loss became nan\n"
    say_failed(TrainingFailed("unused", befell="this rank"), 1)
    assert capsys.readouterr().err == "failed: rank 1: unused\n"


def test_check_replicas_is_a_number_of_steps(recipe_of):
    assert recipe_of("check_replicas: 5").batch.check_replicas == 5
    with pytest.raises(Refused, match=r"training\.check_replicas"):
        recipe_of("check_replicas: 0")
