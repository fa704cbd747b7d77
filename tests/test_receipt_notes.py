"""What the receipt of a recipe has to say about a later run: by the same steps, and the same timed settings."""

import json

import pytest

from past_run_folders import step, write_run
from tunebook.runs.past import read_past_runs
from tunebook.runs.receipts import TIMED_SETTINGS, compare_with_receipt, loss_band, mean_loss, write_receipt

# A loss that falls fastest at the start, where the mean of logged values and that of steps are far apart.
LOSSES = [4.0 / number for number in range(1, 95)]
SETTINGS = {name: f"this {name}" for name in TIMED_SETTINGS}
IDENTITY = {"training.optim": "mine"}
HERE = {"hardware": "a", "world_size": 1}


def logged(*steps):
    """Return the curve of LOSSES that is logged after those steps: each time the mean since the time before."""
    return [(end, sum(LOSSES[start:end]) / (end - start)) for start, end in zip((0, *steps), steps, strict=False)]


EACH_STEP, EACH_TENTH, EACH_FORTIETH = logged(*range(1, 95)), logged(1, *range(10, 91, 10), 94), logged(40, 80, 94)


@pytest.fixture
def receipt(tmp_path):
    return tmp_path / "mine.receipt.json"


def measured(curve=EACH_TENTH, speed=100.0, settings=SETTINGS, **values):
    speeds = {"median": speed, "least": speed, "most": speed}
    known = {"hardware": "a", "device": "cpu", "num_processes": 1, "date": "1", "seconds_per_step": 1.0}
    known["seeds"] = [3]
    known |= {"loss_band": loss_band([curve]), "identity": IDENTITY, "settings": settings, "tokens_per_second": speeds}
    return {**known, **values}


def notes(receipt, curve=EACH_TENTH, settings=SETTINGS, identity=IDENTITY, **summary):
    """Return what is said of a run with that curve, settings and identity (None: it left none)."""
    folder = write_run(receipt.parent / "run", [step(number, loss=loss) for number, loss in curve], **HERE, **summary)
    if identity is not None:
        begun = {"result": {**identity, "training.seed": 3}, "settings": {"processes": 1, **settings}}
        (folder / "identity.json").write_text(json.dumps(begun))
    [run] = read_past_runs([str(folder)])
    return compare_with_receipt(receipt, run)


def test_the_loss_of_some_steps_is_their_mean_whatever_was_logged():
    for start, end in ((1, 10), (11, 30), (31, 50), (91, 94), (1, 94)):
        exact = sum(LOSSES[start - 1 : end]) / (end - start + 1)
        for curve in (EACH_STEP, EACH_TENTH):
            assert mean_loss(curve, start, end) == pytest.approx(exact, rel=1e-12)
    assert mean_loss(EACH_TENTH, 11, 15) is mean_loss(EACH_TENTH, 5, 10) is mean_loss([], 1, 1) is None
    assert mean_loss(EACH_TENTH, 91, 100) is mean_loss([(0, 4.0)], 1, 0) is None


@pytest.mark.parametrize("receipts", [EACH_STEP, EACH_TENTH, EACH_FORTIETH])
@pytest.mark.parametrize("runs", [EACH_STEP, EACH_TENTH, EACH_FORTIETH])
def test_the_same_run_logged_at_other_steps_is_inside_the_band(receipt, receipts, runs):
    write_receipt(receipt, measured(receipts))
    assert notes(receipt, runs) == []


def test_another_run_logged_at_other_steps_is_out_of_the_band(receipt):
    write_receipt(receipt, measured())
    [note] = notes(receipt, [(number, loss * (1.1 if number > 30 else 1)) for number, loss in EACH_STEP])
    assert note.startswith("the loss of steps 31 to 50 is ") and "out of the band of" in note


@pytest.mark.parametrize(
    ("seeds", "notes_made"), [([3], 1), ([4], 0), ([4, 5], 0), ([4, 5, 3], 1), ([4, 5, 6], 1)], ids=str
)
def test_another_seed_is_held_against_three_or_more_alone(receipt, seeds, notes_made):
    write_receipt(receipt, measured(seeds=seeds))
    assert len(notes(receipt, [(number, 2 * loss) for number, loss in EACH_STEP])) == notes_made


def test_a_slow_run_is_told_of_its_speed(receipt):
    write_receipt(receipt, measured(speed=100.0))
    [note] = notes(receipt, tokens_per_second=69.0)
    assert note.startswith("69 trained tokens per second, where ") and "has 100 on the same hardware" in note


@pytest.mark.parametrize("name", TIMED_SETTINGS)
def test_speed_is_compared_with_that_of_the_same_settings_alone(receipt, name):
    write_receipt(receipt, measured(speed=1000.0, settings={**SETTINGS, name: "another"}, trial=True))
    assert notes(receipt, tokens_per_second=69.0) == [], "nothing is known of the speed with these"
    write_receipt(receipt, measured(speed=100.0, date="2", num_processes=2))
    write_receipt(receipt, {**measured(speed=80.0), "trial": True})
    (receipt.parent / "run").rename(receipt.parent / "one")
    assert notes(receipt, tokens_per_second=69.0) == []
    (receipt.parent / "run").rename(receipt.parent / "two")
    [note] = notes(receipt, tokens_per_second=40.0)
    assert "has 80 on the same hardware" in note


@pytest.mark.parametrize("identity", [{"training.optim": "another"}, None])
def test_runs_of_other_values_or_without_identity_are_not_compared(receipt, identity):
    write_receipt(receipt, measured([(1, 9.0)], speed=1e9))
    assert notes(receipt, identity=identity, tokens_per_second=1.0) == []
