"""A run that is broken off and gone on with ends as the unbroken one, on real processes: bit for bit on as many."""

import pytest

from broken_off import (
    NUM_STEPS,
    adapter_of,
    events_of,
    largest_difference,
    losses_of,
    make_place,
    steps_saved,
    summary_of,
)
from fork_server import shared_server
from tiny_models import build_tiny_model

pytestmark = pytest.mark.slow
COUNTED = ("trained_tokens", "processed_tokens", "padded_tokens", "first_loss", "final_loss", "eval_loss")
TAKEN_FROM_START = ("eval_loss_before", "exact_match_before", "num_optimizer_steps", "adapter_sha256")


class Place:
    """A folder with a recipe, and the runs that tests start there."""

    def __init__(self, folder):
        self.folder = make_place(folder)
        self.server = shared_server()
        self.number = 0

    def run(self, name, size=1, *words, recipe="recipe.yaml", **environ):
        """Run the recipe in run folder `name` on `size` processes to its end; return the life."""
        return self.server.wait(self.begin(name, size, *words, recipe=recipe, **environ))

    def begin(self, name, size=1, *words, recipe="recipe.yaml", **environ):
        self.number += 1
        log = self.folder / f"{self.number}-{name}.log"
        environ = {"TUNEBOOK_CACHE": str(self.folder / "cache"), **environ}
        return self.server.start([recipe, "--run-dir", name, *words], size, self.folder, log, **environ)

    def unbroken(self, size, *words):
        """Return the folder of a run that nothing broke off, made once."""
        name = f"unbroken-{size}" + "".join(f"-{word.rpartition('.')[2]}" for word in words)
        if not (self.folder / name).exists():
            life = self.run(name, size, *words)
            assert life.rank_codes() == [0] * size, life.output()[-3000:]
        return self.folder / name


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("resume"))


def stop_after(place, name, size, step, *words, **fault):
    """Have a run get SIGTERM in the middle of the step after `step`, and check that it stopped in order."""
    fault = {"FAULT": "signal_in_window", "FAULT_SIGNAL": "SIGTERM", "FAULT_STEP": str(step), **fault}
    micro = "0" if size == 4 else "1"
    life = place.run(name, size, *words, FAULT_MICRO=micro, **fault)
    assert life.rank_codes() == [75] * size, life.output()[-3000:]
    assert "[fault]" in life.output() and "Traceback" not in life.output()
    return life


def same_result(run_dir, unbroken):
    """Check that adapter, losses, counts and events are those of the unbroken run, bit for bit."""
    assert largest_difference(adapter_of(run_dir), adapter_of(unbroken)) == 0
    assert losses_of(run_dir) == losses_of(unbroken)
    one, other = summary_of(run_dir), summary_of(unbroken)
    for name in (*COUNTED, *TAKEN_FROM_START):
        assert one[name] == other[name], name
    assert [(event["step"], "loss" in event) for event in events_of(run_dir)] == [
        (event["step"], "loss" in event) for event in events_of(unbroken)
    ]
    assert (one["status"], one["exit_code"]) == ("completed", 0)


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_going_on_inside_each_epoch_gives_the_unbroken_run(place, size):
    name = f"stopped-{size}"
    run_dir = place.folder / name
    began_at = 0
    # In epoch 1, in epoch 2, at its end, in epoch 3: each time from where the last life stopped.
    for step in (1, 5, 6, 8):
        life = stop_after(place, name, size, step)
        assert f"stopped by SIGTERM at step {step} of {NUM_STEPS}, and checkpoint-{step} is saved" in life.output()
        assert life.output().count("run the same command again") == 1
        assert began_at == 0 or f"after step {began_at} of {NUM_STEPS}" in life.output()
        summary = summary_of(run_dir)
        assert (summary["status"], summary["exit_code"]) == ("interrupted", 75)
        assert summary["num_optimizer_steps"] == step == steps_saved(run_dir)[-1]
        began_at = step
    again = place.run(name, size)
    assert again.rank_codes() == [0] * size, again.output()[-3000:]
    assert "step 8/9" not in again.output() and "before training" not in again.output()
    same_result(run_dir, place.unbroken(size))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4), (4, 1)])
def test_going_on_with_another_number_of_processes(place, before, after):
    name = f"moved-{before}-{after}"
    stop_after(place, name, before, 4)
    again = place.run(name, after)
    assert again.rank_codes() == [0] * after, again.output()[-3000:]
    assert f"processes: {after}, was {before}" in again.output()
    assert largest_difference(adapter_of(place.folder / name), adapter_of(place.unbroken(1))) < 1e-6
    found, expected = losses_of(place.folder / name), losses_of(place.unbroken(1))
    assert found.keys() == expected.keys() and found == pytest.approx(expected, abs=1e-5)


def test_a_cut_file_is_found_and_the_checkpoint_before_it_is_used(place):
    for file in ("adapter_model.safetensors", "optimizer.pt", "progress.json"):
        name = f"cut-{file[:5]}"
        stop_after(place, name, 1, 5)
        run_dir = place.folder / name
        assert steps_saved(run_dir) == [2, 4, 5]
        damaged = run_dir / "checkpoints" / "checkpoint-5" / file
        damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
        (run_dir / "checkpoints" / "checkpoint-4" / "rng_state.pth").unlink()
        again = place.run(name)
        assert again.rank_codes() == [0], again.output()[-3000:]
        assert f"checkpoint-5 is skipped: {file} has" in again.output()
        assert "checkpoint-4 is skipped: rng_state.pth is missing" in again.output()
        assert "after step 2 of 9" in again.output()
        same_result(run_dir, place.unbroken(1))


def test_dropout_goes_on_where_it_was(place):
    word = "lora.lora_dropout=0.1"
    for size in (1, 2):
        stop_after(place, f"dropout-{size}", size, 4, word)
        assert place.run(f"dropout-{size}", size, word).rank_codes() == [0] * size
        same_result(place.folder / f"dropout-{size}", place.unbroken(size, word))
    assert largest_difference(adapter_of(place.unbroken(1, word)), adapter_of(place.unbroken(1))) > 1e-5


@pytest.fixture(scope="module")
def begun(place):
    """A run that stopped after step 4, in run folder `begun`; beside it other rows and another base."""
    stop_after(place, "begun", 1, 4)
    rows = (place.folder / "rows.jsonl").read_text().splitlines(keepends=True)
    (place.folder / "other.jsonl").write_text("".join(rows[1:] + rows[:1]))
    build_tiny_model(place.folder / "other", hidden_size=64, seed=1)


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["lora.r=8"], ["lora.r: ", "began with 4, this one has 8"]),
        (["lora.target_modules=[q_proj,v_proj,o_proj]"], ["lora.target_modules: ", '"o_proj"']),
        (["lora.target_modules=[k_proj,o_proj]"], ["lora.target_modules: ", '["q_proj", "v_proj"]', '"k_proj"']),
        (["training.global_batch_size=4"], ["training.global_batch_size: ", "began with 8, this one has 4"]),
        (["training.learning_rate=2e-3", "training.seed=7"], ["training.learning_rate: ", "training.seed: ", "0.002"]),
        (["data.max_length=128"], ["data.max_length: ", "began with 256, this one has 128"]),
        (["data.path=other.jsonl"], ["data: the unfinished run"]),
        (["model.name_or_path=other"], ["base model: the unfinished run"]),
    ],
)
def test_what_changes_the_result_is_refused_by_name_with_both_values(place, words, fields):
    before = sorted(place.folder.rglob("begun*/**/*"))
    life = place.run("begun", 1, *words)
    assert life.rank_codes() == [2], life.output()[-3000:]
    for field in (*fields, "--fresh"):
        assert field in life.output()
    assert sorted(place.folder.rglob("begun*/**/*")) == before, "a refused start changes nothing"


def test_what_changes_no_result_is_taken_over_and_announced(place):
    stop_after(place, "taken", 1, 4)
    words = ["training.per_device_train_batch_size=4", "training.activation_checkpointing=true"]
    words += ["training.save_steps=3", "training.logging_steps=1", "data.answer_rows=1", "data.packing=true"]
    again = place.run("taken", 1, *words)
    assert again.rank_codes() == [0], again.output()[-3000:]
    for note in ("per_device_train_batch_size: 4, was 2", "activation_checkpointing: true, was false"):
        assert f"training.{note}; it does not change the result" in again.output()
    assert "training.save_steps: 3, was 2" in again.output()
    assert "data.packing: true, was false; it does not change the result" in again.output()
    assert steps_saved(place.folder / "taken") == [2, 4, 6, 9]
    assert largest_difference(adapter_of(place.folder / "taken"), adapter_of(place.unbroken(1))) < 1e-6


@pytest.mark.usefixtures("begun")
def test_training_longer_is_announced_with_the_rate_of_the_next_step(place):
    stop_after(place, "longer", 1, 4)
    again = place.run("longer", 1, "training.num_train_epochs=6")
    assert again.rank_codes() == [0], again.output()[-3000:]
    assert "training.num_train_epochs: 6, was 3" in again.output()
    assert "schedule length changed from 9 to 18 steps, learning rate at step 5 is 0.000777778" in again.output()
    rates = [event["learning_rate"] for event in events_of(place.folder / "longer") if "loss" in event]
    assert len(rates) == 18 and rates[4:] == sorted(rates[4:], reverse=True) and rates[4] == pytest.approx(7 / 9e3)
    shorter = place.run("begun", 1, "training.num_train_epochs=1")
    assert shorter.rank_codes() == [2] and "would end at step 3" in shorter.output()


def test_a_finished_run_is_left_as_it_is_and_fresh_keeps_it_aside(place):
    unbroken = place.unbroken(1)
    files = {path: path.read_bytes() for path in unbroken.rglob("*") if path.is_file() and path.name != ".lock"}
    again = place.run(unbroken.name)
    assert again.rank_codes() == [0] and "finished already: 9 steps" in again.output()
    assert {path: path.read_bytes() for path in files} == files
    stop_after(place, "renewed", 1, 4)
    fresh = place.run("renewed", 1, "--fresh", "lora.r=8")
    assert fresh.rank_codes() == [0], fresh.output()[-3000:]
    [aside] = place.folder.glob("renewed.*-*")
    assert summary_of(aside)["status"] == "interrupted" and steps_saved(aside) == [2, 4]


def test_a_rank_that_cannot_see_the_checkpoint_is_found_before_weights_load(place):
    stop_after(place, "unseen", 2, 4)
    life = place.run("unseen", 2, FAULT="cannot_see_checkpoints", FAULT_RANKS="1")
    assert life.rank_codes() == [2, 2], life.output()[-3000:]
    assert "rank 1: " in life.output() and "cannot be read on this machine" in life.output()
    assert place.run("unseen", 2).rank_codes() == [0, 0]
    same_result(place.folder / "unseen", place.unbroken(2))
