"""What `auto` chose before is taken up where it holds here and now, or what changed is said."""

import json
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.slow
MADE_FOR = {"recipe": "abc", "processes": 2, "hardware": "a", "TUNEBOOK_MEMORY_GIB": ""}
CHOICE = {"per_device_train_batch_size": 4, "activation_checkpointing": True, "made_for": MADE_FOR}


@pytest.mark.parametrize(
    ("written", "why_not"),
    [
        (None, ""),
        ({"choice": CHOICE}, ""),
        ("", "has none that can be read"),
        ("[" * 100_000, "has none that can be read"),
        ({"choice": None}, "has none that can be read"),
        ({"choice": {**CHOICE, "made_for": "all"}}, "has none that can be read"),
        ({"choice": {**CHOICE, "per_device_train_batch_size": "4"}}, "does not divide the global batch"),
        ({"choice": {**CHOICE, "per_device_train_batch_size": 7}}, "does not divide the global batch"),
        ({"choice": {**CHOICE, "per_device_train_batch_size": True}}, "does not divide the global batch"),
        (
            {"choice": {**CHOICE, "made_for": {**MADE_FOR, "processes": 1, "TUNEBOOK_MEMORY_GIB": "4"}}},
            "was made for another value of processes and TUNEBOOK_MEMORY_GIB",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_earlier_choice_is_taken_up_or_it_is_said_why_not(tmp_path, written, why_not):
    from tunebook.training.choosing import _read_earlier

    if written is not None:
        text = written if isinstance(written, str) else json.dumps(written)
        (tmp_path / "plan.json").write_text(text)
    plan = SimpleNamespace(run_dir=str(tmp_path), global_batch_size=24, world_size=2)
    choice, said = _read_earlier(plan, MADE_FOR)
    assert choice == (CHOICE if written == {"choice": CHOICE} else None)
    assert said.endswith(why_not) and bool(said) == bool(why_not)
