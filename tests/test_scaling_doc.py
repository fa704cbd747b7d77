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


@pytest.mark.parametrize(("recipe", "gpu"), [("qwen7b_qlora", "h100"), ("qwen7b_full", "h200")])
def test_the_tables_are_current_and_for_gpus_that_hold_it(recipe, gpu):
    shown = typed(f"recipes/{recipe}.yaml", "--gpu", gpu)
    assert (shown.returncode, shown.stderr) == (0, "")
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recipes/qwen7b_qlora.yaml", "--gpu", "24"], "the rate of '24' is not known"),
        (["recipes/none.yaml"], "no such recipe"),
        *(
            (["recipes/qwen7b_qlora.yaml", "--tokens-per-row", number], "is no whole number from 1 on")
            for number in ("0", "-1", "1.5", "many", "\u0663")
        ),
        (["recipes/qwen7b_qlora.yaml", "--tokens-per-row", "1" + 400 * "0"], "rows have at most 1,024 tokens"),
        (["DORA"], "how many parameters are trained is not known: "),
        (["UNKNOWN"], "the shape of org/unknown is not known here"),
    ],
    ids=str,
)
def test_what_cannot_be_computed_is_said(tmp_path, words, said):
    dora = "model: {name_or_path: Qwen/Qwen2.5-7B}\nlora: {r: 16, use_dora: true}\ndata: {path: org/rows}\n"
    (tmp_path / "dora.yaml").write_text(dora)
    (tmp_path / "unknown.yaml").write_text(dora.replace("Qwen/Qwen2.5-7B", "org/unknown"))
    places = {"DORA": tmp_path / "dora.yaml", "UNKNOWN": tmp_path / "unknown.yaml"}
    refused = typed(*(places.get(word, word) for word in words))
    assert refused.returncode == 2 and said in refused.stderr and "Traceback" not in refused.stderr


def test_what_does_not_fit_on_the_gpu_is_noted():
    shown = typed("recipes/qwen7b_full.yaml", "--gpu", "h100")
    assert shown.returncode == 0 and shown.stderr.startswith("note: h100 has 80 GiB, and one row of 128 tokens takes ")


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        ("per_device_train_batch_size: 4, gradient_accumulation_steps: 6", 24),  # of one process
        ("global_batch_size: 12, per_device_train_batch_size: 3", 12),  # which eight processes cannot have
        ("global_batch_size: 24, per_device_train_batch_size: auto, activation_checkpointing: auto", 24),
        ("global_batch_size: 7, per_device_train_batch_size: 7", 7),
    ],
)
def test_the_global_batch_is_that_of_the_recipe_however_it_is_told(tmp_path, batch, rows):
    (tmp_path / "mine.yaml").write_text(
        f"model: {{name_or_path: Qwen/Qwen2.5-7B}}\nlora: {{r: 16}}\ndata: {{path: org/rows}}\ntraining: {{{batch}}}\n"
    )
    shown = typed(tmp_path / "mine.yaml")
    assert (shown.returncode, shown.stderr) == (0, "") and f"stays at {rows} rows" in shown.stdout
