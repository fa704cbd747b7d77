"""TrainingArguments: what tunebook sets, what a recipe may change, and what follows from something else."""

import pytest
from accelerate.state import AcceleratorState
from transformers import TrainingArguments

from tiny_training import build_data, build_recipe, plan_of
from tunebook.errors import Refused
from tunebook.launching.process_group import start_process_group, stop_process_group
from tunebook.launching.world import World
from tunebook.plan.schedule import find_schedule_problems
from tunebook.recipe.defaults import FIXED_ARGUMENTS, OUR_DEFAULTS
from tunebook.training.arguments import build_training_arguments, check_optimizer

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def state():
    start_process_group(World())
    yield
    AcceleratorState._reset_state()
    stop_process_group()


def arguments_of(*, validation=0.2, **written):
    recipe = build_recipe("org/tiny", validation=validation, **written)
    return build_training_arguments(recipe, plan_of(recipe, World(), build_data(), "runs/tiny"), World())


def problems_of(**written):
    recipe = build_recipe("org/tiny", **written)
    return find_schedule_problems(recipe, plan_of(recipe, World(), build_data(), "runs/tiny"))


def test_what_the_plan_derived_is_what_trains():
    arguments = arguments_of(seed=7, num_train_epochs=2, warmup_steps=3)
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (2, 4)
    assert (arguments.learning_rate, arguments.num_train_epochs, arguments.warmup_steps) == (1e-3, 2, 3)
    assert (arguments.seed, arguments.data_seed) == (7, 7)
    assert (arguments.output_dir, arguments.run_name) == ("runs/tiny/checkpoints", "tiny")
    assert arguments.use_cpu and not arguments.bf16 and not arguments.fp16
    assert arguments.world_size == 1 and arguments.n_gpu == 0


def test_defaults_are_ours_and_a_recipe_may_change_them():
    arguments = arguments_of()
    assert arguments.activation_checkpointing and arguments.activation_checkpointing_kwargs == {"use_reentrant": False}
    assert arguments.ddp_find_unused_parameters is False
    assert arguments.report_to == [] and arguments.logging_steps == 10 and arguments.logging_first_step
    assert arguments.per_device_eval_batch_size == 2, "as many rows as training has"
    changed = arguments_of(
        activation_checkpointing=False, ddp_find_unused_parameters=True, logging_steps=3, per_device_eval_batch_size=5
    )
    assert not changed.activation_checkpointing and changed.ddp_find_unused_parameters
    assert (changed.logging_steps, changed.per_device_eval_batch_size) == (3, 5)


def test_checkpointing_stays_non_reentrant_beside_other_settings():
    arguments = arguments_of(activation_checkpointing_kwargs={"every_n_layers": 2})
    assert arguments.activation_checkpointing_kwargs == {"use_reentrant": False, "every_n_layers": 2}


def test_what_promises_depend_on_is_fixed():
    arguments = arguments_of()
    for name, value in FIXED_ARGUMENTS.items():
        assert getattr(arguments, name) == value
    assert not FIXED_ARGUMENTS.keys() & OUR_DEFAULTS.keys()


@pytest.mark.parametrize(
    ("written", "strategies"),
    [
        ({}, ("epoch", "no")),
        ({"validation": 0.0}, ("no", "no")),
        ({"eval_steps": 5}, ("steps", "no")),
        ({"eval_strategy": "no"}, ("no", "no")),
    ],
)
def test_when_to_evaluate_follows_from_what_is_held_out(written, strategies):
    arguments = arguments_of(**written)
    assert (arguments.eval_strategy.value, arguments.save_strategy.value) == strategies


def test_the_best_model_is_saved_whenever_it_is_measured():
    recipe = build_recipe("org/tiny", load_best_model_at_end=True)
    written = {name: value for name, value in recipe.arguments.items() if name != "save_strategy"}
    object.__setattr__(recipe, "arguments", written)
    arguments = build_training_arguments(recipe, plan_of(recipe, World(), build_data(), "runs/tiny"), World())
    assert arguments.save_strategy.value == arguments.eval_strategy.value == "epoch"
    assert arguments.metric_for_best_model == "loss" and arguments.greater_is_better is False


def test_what_transformers_rejects_is_a_refusal_with_its_reason():
    with pytest.raises(Refused, match=r"recipes/tiny.yaml: training: .*warmup_steps"):
        arguments_of(warmup_steps=-1)


def test_upstream_defaults_that_ours_replace_are_what_they_were():
    """When one of these fails, upstream has changed its mind and a line of ours may go."""
    upstream = {field.name: field.default for field in TrainingArguments.__dataclass_fields__.values()}
    assert upstream["logging_nan_inf_filter"] is True
    assert upstream["train_sampling_strategy"] != "batch_rebalance"
    assert upstream["ddp_find_unused_parameters"] is None
    assert not upstream["activation_checkpointing"]


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ({"lr_scheduler_kwargs": {"nope": 1}}, "training.lr_scheduler_kwargs"),
        ({"lr_scheduler_kwargs": {"num_cycle": 2}}, "training.lr_scheduler_kwargs"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "training.lr_scheduler_type"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "training.lr_scheduler_type"),
        ({"lr_scheduler_type": "polynomial", "learning_rate": 1e-8}, "training.lr_scheduler_type"),
    ],
)
def test_a_schedule_that_cannot_be_made_is_a_problem_of_its_key(written, key):
    assert [problem.key for problem in problems_of(**written)] == [key]


def test_an_optimizer_that_cannot_be_made_is_refused_before_weights_load():
    with pytest.raises(Refused) as refused:
        check_optimizer(arguments_of(optim="adamw_8bit", optim_args="foo"))
    assert [problem.key for problem in refused.value.problems] == ["training.optim_args"]
    check_optimizer(arguments_of())


def test_every_schedule_that_works_is_let_through():
    for kind in (
        "linear",
        "cosine",
        "constant",
        "constant_with_warmup",
        "polynomial",
        "inverse_sqrt",
        "cosine_with_restarts",
    ):
        assert problems_of(lr_scheduler_type=kind, warmup_steps=0.5) == []
    assert problems_of(lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 2}) == []


def test_the_best_checkpoint_is_chosen_by_the_held_out_loss():
    arguments = arguments_of(save_strategy="best")
    assert (arguments.metric_for_best_model, arguments.greater_is_better) == ("loss", False)
    assert arguments_of(report_to=None).report_to == []
