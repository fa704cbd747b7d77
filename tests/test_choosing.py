"""`auto` in real runs: what is chosen fits, was the fastest measured, and trains the adapter of a run set by hand."""

import json

import pytest

from broken_off import RECIPE, adapter_of, largest_difference, make_place, summary_of
from finished_runs import finished_place, train_in
from tunebook.plan.memory import GIB
from tunebook.plan.memory_limit import VARIABLE
from tunebook.plan.memory_plan import TIGHT

pytestmark = [pytest.mark.slow, pytest.mark.long]  # minutes in all: in `make test-slow`
# By its plan micro-batch 8 fits into so much with checkpointing alone, and up to 4 in either way.
LIMIT_GIB = "0.0075"
SIGNAL = {"FAULT": "signal_in_window", "FAULT_SIGNAL": "SIGTERM", "FAULT_STEP": "4", "FAULT_MICRO": "0"}
LEFT_OPEN = RECIPE.replace("batch_size: 2", "batch_size: auto").replace("checkpointing: false", "checkpointing: auto")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = make_place(tmp_path_factory.mktemp("choosing"))
    (folder / "open.yaml").write_text(LEFT_OPEN)
    return folder


def begin(place, name, size, *words, code=0, **environ):
    """Run the open recipe into run folder `name`; return what its ranks printed."""
    (place / "finetune.log").unlink(missing_ok=True)
    environ = {VARIABLE: LIMIT_GIB, **environ}
    words = ("--run-dir", name, "data.answer_rows=0", *words)
    life = train_in(place, *words, recipe="open.yaml", size=size, **environ)
    assert life.rank_codes() == [code] * size, life.output()[-3000:]
    return life.output()


def choice_of(run_dir):
    plan = json.loads((run_dir / "plan.json").read_text())
    assert plan["per_device_train_batch_size"] * plan["gradient_accumulation_steps"] * plan["world_size"] == 8
    choice = plan["choice"]
    for key in ("per_device_train_batch_size", "activation_checkpointing"):
        assert choice[key] == plan[key]
    return choice


def key_of(setting):
    return setting["per_device_train_batch_size"], setting["activation_checkpointing"]


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_choice_fits_was_the_fastest_and_trains_the_adapter_set_by_hand(place, size):
    short = ("training.num_train_epochs=1",)
    output = begin(place, f"open-{size}", size, *short)
    choice = choice_of(place / f"open-{size}")
    limit = float(LIMIT_GIB) * GIB
    assert choice["limit_bytes"] == round(limit)
    sizes = [1, 2, 4, 8][: 4 if size == 1 else 3]
    assert {key_of(one) for one in choice["candidates"]} == {(rows, way) for rows in sizes for way in (True, False)}
    for one in choice["candidates"]:
        assert (one["planned_bytes"] <= TIGHT * limit) == (one["why_not"] != "does not fit")
    assert ((8, False) in {key_of(one) for one in choice["candidates"] if one["why_not"] == "does not fit"}) == (
        size == 1
    )
    measured = [one for one in choice["candidates"] if one["tokens_per_second"] is not None]
    assert len(measured) == 4 and not any(one["why_not"] for one in measured)
    fastest = max(measured, key=lambda one: one["tokens_per_second"])
    assert key_of(choice) == key_of(fastest)
    rows, checkpointing = key_of(choice)
    way = "on" if checkpointing else "off"
    said = f"auto: micro-batch {rows}, activation checkpointing {way}: {fastest['tokens_per_second']:,.0f} trained"
    assert output.count(said) == 1 and f"GiB are allowed by {VARIABLE}" in output
    summary = summary_of(place / f"open-{size}")
    assert summary["per_device_train_batch_size"] == rows
    words = [f"training.per_device_train_batch_size={rows}"]
    words += [f"training.activation_checkpointing={str(checkpointing).lower()}"]
    begin(place, f"hand-{size}", size, *short, *words)
    by_hand = summary_of(place / f"hand-{size}")
    assert by_hand["adapter_sha256"] == summary["adapter_sha256"]
    for name in ("processed_tokens", "first_loss", "final_loss", "eval_loss"):
        assert by_hand[name] == summary[name]


def test_a_run_that_goes_on_keeps_what_was_chosen(place):
    assert "the fastest of" in begin(place, "kept", 1, code=75, **SIGNAL)
    # A choice that no measurement would make: were anything measured again, it would be another.
    path = place / "kept" / "plan.json"
    plan = json.loads(path.read_text())
    plan["choice"] |= {"per_device_train_batch_size": 1, "activation_checkpointing": True}
    path.write_text(json.dumps(plan))
    output = begin(place, "kept", 1)
    assert "auto: micro-batch 1, activation checkpointing on, as the run in kept began" in output
    assert "the fastest of" not in output and ", was " not in output
    assert key_of(choice_of(place / "kept")) == (1, True)
    assert json.loads(path.read_text())["choice"] == plan["choice"]


@pytest.mark.long
def test_another_limit_chooses_anew_and_a_finished_run_is_left(place):
    begin(place, "broken", 1, code=75, **SIGNAL)
    output = begin(place, "broken", 1, **{VARIABLE: "1"})
    assert "the fastest of" in output and "1.00 GiB are allowed" in output
    assert f"auto: chosen anew: that of broken/plan.json was made for another value of {VARIABLE}" in output
    assert largest_difference(adapter_of(place / "broken"), adapter_of(finished_place() / "runs" / "recipe")) < 1e-6
    assert "finished already: 9 steps" in begin(place, "broken", 1, **{VARIABLE: "1"})


def test_what_one_rank_has_no_memory_for_no_rank_does(place):
    output = begin(place, "short", 2, SCRIPT="train_ddp", FAULT="probe_without_memory", FAULT_RANKS="1")
    assert output.count("[fault] rank 1 has no memory") == 3
    choice = choice_of(place / "short")
    assert choice["activation_checkpointing"] is True
    outcomes = {key_of(one): one["why_not"] for one in choice["candidates"]}
    assert [outcomes[rows, False] for rows in (1, 2, 4)] == ["out of memory"] * 3
    assert outcomes[key_of(choice)] == ""
    assert largest_difference(adapter_of(place / "short"), adapter_of(finished_place() / "runs" / "recipe")) < 1e-6


def test_all_ranks_choose_by_the_shape_that_rank_0_knows(place):
    output = begin(place, "unseen", 2, "training.num_train_epochs=1", FAULT="no_shape_known", FAULT_RANKS="1")
    assert output.count("[fault] rank 1 knows no shape") == 1 and "the fastest of" in output
    assert len(choice_of(place / "unseen")["candidates"]) == 6


def test_what_fits_nowhere_is_refused_before_weights_load(place):
    output = begin(place, "none", 1, code=2, **{VARIABLE: "0.0001"})
    assert output.count("auto finds nothing that fits: micro-batch 1, activation checkpointing on needs") == 1
    assert "open.yaml:" in output and "max_length" in output and not (place / "none").exists()
    assert "'lots'" in begin(place, "none", 1, code=2, **{VARIABLE: "lots"})


@pytest.fixture
def build(tmp_path):
    """Build a run of a tiny base in this process."""
    from transformers import AutoTokenizer

    from tiny_training import build_base, build_data, build_recipe, plan_of
    from tunebook.launching.process_group import start_process_group, stop_process_group
    from tunebook.launching.world import World
    from tunebook.training.ready import build_run

    base, data, world = build_base(tmp_path / "base"), build_data(), World()
    tokenizer = AutoTokenizer.from_pretrained(base)
    start_process_group(world)

    def build_one(**settings):
        recipe = build_recipe(base, **{"per_device_train_batch_size": "auto", **settings})
        return build_run(recipe, plan_of(recipe, world, data, tmp_path / "run"), world, tokenizer, data)

    yield build_one
    stop_process_group()


def test_a_measurement_leaves_the_model_as_it_was(build):
    import torch

    from tunebook.training.saving import random_states

    states = []
    for way in (False, "auto"):
        run = build(per_device_train_batch_size=2, activation_checkpointing=way)
        model = run.model
        assert not model.is_activation_checkpointing and run.arguments.per_device_train_batch_size == 2
        hooks = len(model.get_input_embeddings()._forward_hooks)
        states.append((model.state_dict(), random_states()["cpu"], model.training, hooks))
        assert all(parameter.grad is None for parameter in model.parameters())
    assert run.plan.choice is not None and len(run.plan.choice["candidates"]) == 2
    assert run.arguments.activation_checkpointing == run.plan.activation_checkpointing
    (before, *rest_before), (after, *rest_after) = states
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(rest_before[0], rest_after[0]) and rest_before[1:] == rest_after[1:]


def test_what_was_too_large_when_measured_is_said_as_it_was(build, monkeypatch):
    from tunebook.training.probing import Probe

    too_much = Probe(seconds=1.0, peak_bytes=2**50)
    monkeypatch.setattr(
        "tunebook.training.choosing.probe", lambda able, *more: [too_much] * (len(able) - 1) + [Probe()]
    )
    reason = build().plan.choice["reason"]
    assert "too little memory left for the optimizer, 1 not measured" in reason and "ran out" not in reason
    ran_out = Probe(ran_out=True)
    monkeypatch.setattr("tunebook.training.choosing.probe", lambda able, *more: [ran_out] * len(able))
    assert "it needs the least; 4 out of memory" in build().plan.choice["reason"]


def test_what_the_optimizer_computes_with_is_not_added_to_a_peak_before_it(build, monkeypatch):
    from tunebook.plan.memory import CUDA_CONTEXT_BYTES
    from tunebook.training.probing import Probe

    monkeypatch.setenv(VARIABLE, "1")
    model = build(per_device_train_batch_size=2).model
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    room = int(TIGHT * GIB) - CUDA_CONTEXT_BYTES - 8 * trained  # two moments in float32
    for peak, said in ((room, "trained tokens/s"), (room + 1, "too little memory left for the optimizer")):
        probe = Probe(seconds=1.0, peak_bytes=peak)
        monkeypatch.setattr("tunebook.training.choosing.probe", lambda able, *more, one=probe: [one] * len(able))
        assert said in build(optim="adamw_torch").plan.choice["reason"]


def test_what_cannot_be_measured_is_said(build, monkeypatch):
    packed = build(packing=True).plan
    assert {one["per_device_train_batch_size"] for one in packed.choice["candidates"]} == {1, 2, 4, 8}
    assert packed.choice["reason"].count("trained tokens/s") == 1
    assert packed.activation_checkpointing is True, "it was not left open"
    monkeypatch.setattr("tunebook.training.choosing.find_shape", lambda *names: None)
    unknown = build().plan
    assert (unknown.per_device_train_batch_size, unknown.gradient_accumulation_steps) == (8, 1)
    assert "the shape of" in unknown.choice["reason"] and "not known" in unknown.choice["reason"]
    assert unknown.origins["per_device_train_batch_size"] == f"auto: {unknown.choice['reason']}"
