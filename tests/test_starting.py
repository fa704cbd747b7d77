"""What is said of a run that is begun anew, or gone on with, on other processes and for longer."""

import json

import pytest

from tunebook.launching.world import World
from tunebook.plan.plan import build_plan
from tunebook.recipe.reading import load_recipe
from tunebook.runs.checkpoints import PROGRESS, finish_checkpoint
from tunebook.runs.identity import recipe_identity, taken_over

pytestmark = pytest.mark.slow

RECIPE = """\
model: {name_or_path: org/base}
lora: {r: 8, lora_dropout: 0.1}
data: {path: org/rows}
training: {global_batch_size: 8, num_train_epochs: 1}
"""


@pytest.fixture
def decided(tmp_path):
    """What is decided for two processes and two epochs in the folder of a run that began with one of each."""
    from tunebook.training.starting import _decide

    (tmp_path / "mine.yaml").write_text(RECIPE)
    recipe = load_recipe(str(tmp_path / "mine.yaml"))
    folder = tmp_path / "run"
    folder.mkdir()
    plan = build_plan(recipe, World(), run_dir=str(folder))
    begun = {"result": recipe_identity(recipe, plan), "settings": taken_over(recipe, plan)}
    (folder / "identity.json").write_text(json.dumps(begun))
    longer = load_recipe(recipe.path, ["training.num_train_epochs=2"])
    planned = build_plan(longer, World(num_processes=2), run_dir=str(folder))
    return folder, lambda: _decide(longer, planned, recipe_identity(longer, planned), fresh=False)


def test_a_run_without_a_checkpoint_starts_over_with_nothing_said_of_what_it_keeps_nothing_of(decided):
    folder, decide = decided
    start = decide()
    assert start.keep and start.checkpoint is None
    assert start.notes == (f"no whole checkpoint in {folder}: the unfinished run there starts again from step 0",)


def test_a_run_that_goes_on_says_what_is_drawn_anew_and_that_its_schedule_is_another(decided):
    folder, decide = decided
    beside = folder / "beside"
    beside.mkdir()
    (beside / PROGRESS).write_text("{}")
    (folder / "checkpoints").mkdir()
    finish_checkpoint(beside, folder / "checkpoints" / "checkpoint-1", 1)
    start = decide()
    assert start.checkpoint is not None and start.checkpoint.step == 1
    *taken_over, schedule, where = start.notes
    [processes] = [note for note in taken_over if note.startswith("processes: 2, was 1; ")]
    assert "from here on lora.lora_dropout 0.1 draws other numbers" in processes
    assert schedule.startswith("training.num_train_epochs: 2, was 1; the adapter is not that of a run planned so")
    assert where.startswith(f"going on from {folder / 'checkpoints' / 'checkpoint-1'}, after step 1 of ")
