"""run_summary.json: whole at every moment, and a hash of what the recipe says rather than of how it is written."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tiny_training import build_data, build_recipe, plan_of
from tunebook.errors import Interrupted
from tunebook.launching.world import World
from tunebook.training.summary import failed_summary, recipe_sha256, start_summary, write_summary

pytestmark = pytest.mark.slow


@pytest.fixture
def summary():
    recipe, data = build_recipe("org/tiny", model={"revision": "v1"}), build_data()
    model = SimpleNamespace(config=SimpleNamespace(_commit_hash="abc123"))
    return start_summary(recipe, plan_of(recipe, World(), data, "runs/tiny"), World(), data, model)


def test_a_run_that_begins_says_what_it_is(summary, tmp_path):
    write_summary(summary, str(tmp_path / "run"))
    written = json.loads((tmp_path / "run" / "run_summary.json").read_text())
    assert (written["status"], written["exit_code"], written["error"]) == ("running", None, None)
    assert (written["model"], written["model_revision"]) == ("org/tiny", "abc123")
    assert (written["num_train_rows"], written["num_eval_rows"], written["global_batch_size"]) == (21, 7, 8)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run_summary.json"]


def test_how_a_run_ended_is_told_with_the_reason(summary):
    failed = failed_summary(summary, RuntimeError("no more memory"))
    assert (failed.status, failed.exit_code, failed.error) == ("failed", 1, "RuntimeError: no more memory")
    stopped = failed_summary(summary, Interrupted("stopped by SIGTERM at step 7", 7))
    assert (stopped.status, stopped.exit_code, stopped.error) == ("interrupted", 75, "stopped by SIGTERM at step 7")


def test_the_recipe_hash_is_of_its_meaning():
    recipe = build_recipe("org/tiny", seed=1)
    backwards = dict(reversed(recipe.resolved.items()))
    assert recipe_sha256(replace(recipe, resolved=backwards, path="elsewhere.yaml")) == recipe_sha256(recipe)
    assert recipe_sha256(build_recipe("org/tiny", seed=2)) != recipe_sha256(recipe)
