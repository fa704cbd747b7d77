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
from fork_server import ForkServer

pytestmark = pytest.mark.slow
COUNTED = ("trained_tokens", "processed_tokens", "padded_tokens", "first_loss", "final_loss", "eval_loss")
TAKEN_FROM_START = ("eval_loss_before", "exact_match_before", "num_optimizer_steps", "adapter_sha256")


class Place:
    """A folder with a recipe, and the runs that tests start there."""

    def __init__(self, folder):
        self.folder = make_place(folder)
        self.server = ForkServer()
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
    place = Place(tmp_path_factory.mktemp("resume"))
    yield place
    place.server.close()


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


@pytest.mark.parametrize("size", [1, 2, 4])
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
