"""The tables of docs/scaling.md are what the script prints."""

import subprocess
import sys

import pytest

from checkout import ROOT

SCRIPT = ROOT / "scripts" / "scaling_table.py"


def typed(*words):
    return subprocess.run([sys.executable, SCRIPT, *words], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("recipe", ["qwen7b_qlora", "qwen7b_full"])
def test_the_tables_are_current(recipe):
    shown = typed(f"recipes/{recipe}.yaml")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip() in (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")


def test_the_all_reduce_of_two_moves_the_gradient_once_through_each_link():
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        from scaling_table import Step
    finally:
        sys.path.pop(0)
    step = Step(processes=2, rows=1, compute=1.0, gradient=10**9)
    assert step.reduce_seconds(1e9, 0) == 1.0 and step.efficiency(1e9, 0) == 0.5
    assert Step(1, 1, 1.0, 10**9).reduce_seconds(1e9, 1) == 0


def test_what_cannot_be_computed_is_said(tmp_path):
    assert "give a name" in typed("recipes/qwen7b_qlora.yaml", "--gpu", "24").stderr
    refused = typed("recipes/none.yaml")
    assert refused.returncode != 0 and "Traceback" not in refused.stderr
