"""What `--plan` advises: nothing that is set already, and what helps first."""

from types import SimpleNamespace

import pytest

from tunebook.durations import plan_duration
from tunebook.findings import find_data_warnings
from tunebook.recipe.schema import DataSection
from tunebook.whole_plan_text import render_duration


@pytest.mark.parametrize(
    ("settings", "equal", "padding", "keys"),
    [
        ({}, 2, 0.0, ["data.deduplicate"]),
        ({}, 1, 0.0, []),
        ({}, None, 0.0, []),
        ({"deduplicate": True}, 50, 0.0, []),
        ({}, 0, 0.5, ["data.packing"]),
        ({"packing": True}, 0, 0.5, []),
    ],
)
def test_data_is_warned_of_once_and_only_what_is_not_set(settings, equal, padding, keys):
    data = DataSection(path="rows.jsonl", **settings)
    assert [each.key for each in find_data_warnings(data, 100, equal, padding)] == keys


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.02, "0.2 s in all"), (1, "10 s in all"), (6, "1.0 min in all"), (360, "1.0 h in all")]
)
def test_short_runs_are_told_in_seconds(seconds, shown):
    plan = SimpleNamespace(steps_per_epoch=None, num_optimizer_steps=10)
    assert shown in render_duration(plan_duration(plan, seconds, "measured"))
