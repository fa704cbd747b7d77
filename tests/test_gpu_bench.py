"""The benchmark for GPUs runs from end to end without one: no minute of a GPU is spent on a typing mistake."""

import subprocess
import sys

import pytest

from checkout import ROOT

BENCH = ROOT / "benchmarks" / "gpu.py"


def typed(*words):
    return subprocess.run([sys.executable, BENCH, *words], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.long
def test_it_measures_a_tiny_model_on_the_cpu_and_names_what_is_missing():
    shown = typed("--tiny")
    assert shown.returncode == 0, shown.stderr[-3000:]
    assert "small NF4 model against float32: {'loss_off': " in shown.stdout
    rows = [line.split(" | ") for line in shown.stdout.splitlines() if line.startswith("| ") and " x " in line]
    measured = [row for row in rows if row[1].strip().replace(".", "").isdigit()]
    assert len(rows) == 14 and len(measured) >= 8, shown.stdout
    assert all(row[1].strip() for row in rows), "a figure, or what is missing"
