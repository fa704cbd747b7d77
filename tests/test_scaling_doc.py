"""The tables of docs/scaling.md are what the script prints, and its figures what was measured."""

import json
import re
import subprocess
import sys

import pytest

from checkout import ROOT

SCRIPT = ROOT / "scripts" / "scaling_table.py"
MEASURED = ROOT / "benchmarks" / "results" / "process_scaling.json"


def typed(*words):
    return subprocess.run([sys.executable, SCRIPT, *words], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("recipe", ["qwen7b_qlora", "qwen7b_full"])
def test_the_tables_are_current(recipe):
    shown = typed(f"recipes/{recipe}.yaml")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip() in (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")


def test_what_a_second_process_was_worth_is_what_was_measured():
    found = json.loads(MEASURED.read_text(encoding="utf-8"))
    text = " ".join((ROOT / "docs" / "scaling.md").read_text(encoding="utf-8").split())
    shown = re.findall(r"([\d.]+) (?:times the trained tokens a second|times) \(([\d.]+) to ([\d.]+)\)", text)
    for size, said in zip(("larger", "tiny"), shown, strict=True):
        measured = [found[size]["speed_up"], *found[size]["least_to_most"]]
        assert [float(one) for one in said] == measured, f"{size}: docs/scaling.md says {said}, the file {measured}"
    load = f"load average was {found['machine']['load_average'][0]:.1f} as they began"
    assert load in text, f"the file says: {load}"


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
