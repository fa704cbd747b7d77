"""`auto` in a recipe: where the word may stand, what the plan says of it before anything is measured."""

import json
from dataclasses import replace

import pytest

from tunebook.errors import Refused
from tunebook.launching.command_line import read_command
from tunebook.launching.files import render_launch_file
from tunebook.launching.world import World, world_of
from tunebook.model.shapes import find_shape
from tunebook.plan.arithmetic import DECIDED_AT_START
from tunebook.plan.candidates import Candidate, explain_no_fit, find_candidates, keep_fitting, thin
from tunebook.plan.memory import GIB
from tunebook.plan.memory_limit import VARIABLE, find_limit, free_bytes, name_limit
from tunebook.plan.memory_plan import TIGHT
from tunebook.plan.padding import find_steps, lay_out
from tunebook.plan.plan import build_plan
from tunebook.plan.planning import plan_without_data
from tunebook.plan.whole_plan import complete_plan
from tunebook.recipe.reading import load_recipe
from tunebook.runs.identity import find_differences, find_taken_over, recipe_identity, taken_over
from tunebook.training.batches import epoch_order

MICRO, CHECKPOINTING = "training.per_device_train_batch_size=auto", "training.activation_checkpointing=auto"
RECIPE = """
model: {name_or_path: Qwen/Qwen2.5-7B, dtype: bfloat16}
quantization: {load_in_4bit: true, bnb_4bit_quant_type: nf4}
lora: {r: 16}
data: {path: org/rows, max_length: 1024}
training: {learning_rate: 1e-4}
"""
BATCH = "training.global_batch_size=48"


@pytest.fixture
def read(tmp_path):
    def read_recipe(*words):
        path = tmp_path / "case.yaml"
        path.write_text(RECIPE)
        return load_recipe(str(path), words)

    return read_recipe


def refusal(read, *words):
    with pytest.raises(Refused) as refused:
        build_plan(read(*words), World())
    [problem] = refused.value.problems
    return problem


@pytest.mark.parametrize("alias", ["activation_checkpointing", "gradient_checkpointing"])
def test_both_keys_take_the_word_and_the_plan_has_numbers_to_begin_with(read, alias):
    recipe = read(BATCH, MICRO, f"training.{alias}=auto")
    assert recipe.chooses_micro_batch and recipe.chooses_checkpointing
    assert recipe.resolved["training"]["per_device_train_batch_size"] == "auto"
    plan = build_plan(recipe, world_of(2))
    assert (plan.per_device_train_batch_size, plan.gradient_accumulation_steps) == (8, 3)
    assert plan.activation_checkpointing is True and plan.choice is None
    assert plan.origins["per_device_train_batch_size"] == plan.origins["activation_checkpointing"] == DECIDED_AT_START


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("per_device_train_batch_size", "atuo", "a whole number or auto"),
        ("per_device_train_batch_size", "Auto", "a whole number or auto"),
        ("per_device_train_batch_size", "true", "a whole number or auto"),
        ("per_device_train_batch_size", "2.5", "a whole number or auto"),
        ("activation_checkpointing", "automatic", "true or false or auto"),
        ("activation_checkpointing", "1", "true or false or auto"),
        ("gradient_checkpointing", "aut", "true or false or auto"),
        ("per_device_eval_batch_size", "auto", "a whole number"),
        ("gradient_accumulation_steps", "auto", "a whole number"),
        ("global_batch_size", "auto", "a whole number"),
    ],
)
def test_another_word_and_the_word_elsewhere_are_refused(read, key, value, said):
    words = [] if key in ("global_batch_size", "gradient_accumulation_steps") else [BATCH]
    problem = refusal(read, *words, f"training.{key}={value}")
    assert problem.key == f"training.{key}" and said in problem.message


def test_the_classic_pair_has_no_micro_batch_to_choose(read):
    for words in ([], ["training.gradient_accumulation_steps=4"]):
        problem = refusal(read, MICRO, *words)
        assert problem.key == "training.per_device_train_batch_size"
        assert "rows of a step grow with the micro-batch" in problem.message and "global_batch_size" in problem.fix
    assert build_plan(read(CHECKPOINTING), World()).global_batch_size == 8, "checkpointing may be chosen all the same"


def test_where_random_numbers_are_drawn_the_micro_batch_is_not_left_open(read):
    problem = refusal(read, BATCH, MICRO, "lora.lora_dropout=0.1")
    assert problem.key == "training.per_device_train_batch_size" and "lora.lora_dropout 0.1" in problem.message
    assert build_plan(read(BATCH, CHECKPOINTING, "lora.lora_dropout=0.1"), World()).activation_checkpointing


def test_what_was_chosen_makes_no_other_run(read):
    recipe, by_hand = read(BATCH, MICRO, CHECKPOINTING), read(BATCH, "training.per_device_train_batch_size=4")
    plan = build_plan(recipe, World())
    chosen = replace(
        plan, per_device_train_batch_size=2, gradient_accumulation_steps=24, activation_checkpointing=False
    )
    identity = recipe_identity(recipe, plan)
    assert identity == recipe_identity(recipe, chosen)
    assert find_differences(identity, recipe_identity(by_hand, build_plan(by_hand, World())), "runs/case") == []
    assert find_taken_over(taken_over(recipe, chosen), taken_over(recipe, plan), ()) == []
    notes = find_taken_over(taken_over(by_hand, build_plan(by_hand, World())), taken_over(recipe, plan), ())
    assert "training.per_device_train_batch_size: auto, was 4; it does not change the result" in notes


def test_the_plan_on_a_gpu_tells_what_memory_alone_would_choose(read):
    recipe, chosen = read(BATCH, MICRO, CHECKPOINTING), {}
    for gpu in ("10", "16", "80"):
        command = read_command(["x.yaml", "--plan", "--gpu", gpu])
        whole = complete_plan(recipe, build_plan(recipe, world_of(1, "cuda")), command)
        whole.refuse_errors()
        plan = whole.plan
        assert whole.memory.needed <= TIGHT * float(gpu) * GIB
        assert "by memory alone" in plan.origins["per_device_train_batch_size"]
        assert "the run measures" in plan.origins["activation_checkpointing"]
        assert plan.gradient_accumulation_steps * plan.per_device_train_batch_size == 48
        chosen[gpu] = (plan.activation_checkpointing, plan.per_device_train_batch_size)
    assert chosen["10"][0] is True and chosen["80"][0] is False, chosen
    json.dumps(whole.as_dict())
    tiny = read_command(["x.yaml", "--plan", "--gpu", "2"])
    warned = complete_plan(recipe, build_plan(recipe, world_of(1, "cuda")), tiny)
    warned.refuse_errors()
    assert any("does not fit" in finding.message for finding in warned.findings)


def test_candidates_are_all_that_is_open_and_those_that_fit_leave_something_to_spare(read):
    recipe = read(BATCH, MICRO, CHECKPOINTING)
    plan = build_plan(recipe, world_of(2, "cuda"))
    shape = find_shape(plan.model)
    found = find_candidates(recipe, plan, shape, None)
    sizes = {candidate.micro_batch for candidate in found}
    assert sizes == {1, 2, 3, 6, 12, 24} and len(found) == 12, "of 24 rows each; 4 and 8 are near another"
    assert [one.cost for one in found] == sorted(one.cost for one in found)
    limit = 16 * GIB
    fitting = keep_fitting(found, limit)
    assert 0 < len(fitting) < 12 and all(one.needed <= TIGHT * limit for one in fitting)
    assert all(one.needed > TIGHT * limit for one in found if one not in fitting)
    smallest = min(found, key=lambda one: one.needed)
    assert keep_fitting(found, smallest.needed) == [smallest], "with nothing to spare the smallest is taken"
    assert keep_fitting(found, smallest.needed - 1) == []
    problem = explain_no_fit(found, 3 * GIB, "there")
    assert smallest.name in problem.message and "3.00 GiB are there" in problem.message
    only = find_candidates(read(BATCH, "training.per_device_train_batch_size=4", CHECKPOINTING), plan, None, None)
    assert {(one.micro_batch, one.needed) for one in only} == {(plan.per_device_train_batch_size, None)}
    assert thin([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == [1, 2, 3, 5, 8]
    assert Candidate(4, True, None, 0.0).name == "micro-batch 4, activation checkpointing on"


def test_the_fullest_micro_batch_of_joined_rows_has_the_most_tokens_not_the_longest_row(read):
    """Among 300 steps, the last of which has 16 rows of 60 tokens, and all others after the first 100 one of 150."""
    recipe = read("training.global_batch_size=16", "training.per_device_train_batch_size=4", "data.packing=true")
    plan, order = build_plan(recipe, world_of(2, "cpu")), epoch_order(300 * 16, recipe.data_seed, 0)
    lengths = [10] * len(order)
    for place, row in enumerate(order):
        if place >= 299 * 16:
            lengths[row] = 60
        elif place >= 100 * 16 and place % 16 == 0:
            lengths[row] = 150
    layout = lay_out(recipe, plan, lengths, find_steps(recipe, plan, lengths))
    assert layout.shape == (1, 4 * 60) and set(layout.fullest) <= set(order[299 * 16 :])
    assert layout.num_micro_batches == 2


def test_files_for_clusters_say_that_the_number_is_open(read):
    plan = build_plan(read(BATCH, MICRO), world_of(2, "cuda"))
    assert "2 processes x 8 rows (auto) x 3 micro-steps" in render_launch_file("torchrun", plan, ["case.yaml"], 1, 2)
    plan = build_plan(read(BATCH), world_of(2, "cuda"))
    assert "(auto)" not in render_launch_file("torchrun", plan, ["case.yaml"], 1, 2)


def test_the_limit_is_what_is_said_or_a_share_of_what_is_free(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "1.5")
    assert find_limit(World()) == 1.5 * GIB
    assert name_limit(World(device_type="cuda"), GIB) == "on the smallest GPU", "which has less than is allowed"
    for device in ("cuda", "cpu"):
        assert name_limit(World(device_type=device), 3 * GIB // 2) == f"allowed by {VARIABLE}"
    for wrong in ("much", "0", "-1", "nan", "inf"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(Refused) as refused:
            find_limit(World())
        assert refused.value.problems[0].where == VARIABLE and repr(wrong) in refused.value.problems[0].message
    monkeypatch.delenv(VARIABLE)
    assert 0 < find_limit(World(num_processes=4, num_local_processes=4)) < find_limit(World())
    meminfo, group = tmp_path / "meminfo", tmp_path / "group"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable: 5000 kB\n")
    assert free_bytes(meminfo, group) == 5000 * 1024
    group.mkdir()
    for name, text in (("max", "max"), ("current", "900000"), ("stat", "anon 1\ninactive_file 500000")):
        (group / f"memory.{name}").write_text(text)
    assert free_bytes(meminfo, group) == 5000 * 1024, "no limit"
    (group / "memory.max").write_text("1000000\n")
    assert free_bytes(meminfo, group) == 600000
    assert free_bytes(tmp_path / "absent", tmp_path / "none") > GIB // 4


def test_a_memory_limit_that_cannot_be_read_is_refused_in_a_plan_too(read, monkeypatch):
    monkeypatch.setenv(VARIABLE, "-3")
    with pytest.raises(Refused, match="TUNEBOOK_MEMORY_GIB: got '-3'"):
        plan_without_data(read(BATCH, MICRO), world_of(2, "cpu"), None)
    assert plan_without_data(read(BATCH, MICRO.replace("auto", "4")), world_of(2, "cpu"), None)
