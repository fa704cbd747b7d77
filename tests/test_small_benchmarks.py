"""The small benchmarks: both sides of a ratio are timed alike and by turns, and what is missing is said."""

import os
import re
import subprocess
import sys

import pytest

from checkout import ROOT, type_command

sys.path.insert(0, str(ROOT / "benchmarks"))

import packing_speed
import start_time


@pytest.mark.parametrize("name", ["data_speed", "packing_speed", "padding_share", "process_scaling"])
def test_missing_files_are_said(name, tmp_path):
    words = ["--rows", tmp_path / "rows.json", "--tokenizer", ROOT / "assets" / "tiny-qwen2"]
    command = [sys.executable, ROOT / "benchmarks" / f"{name}.py", *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "rows.json not found: give --rows ROWS.json and --tokenizer FOLDER" in ended.stderr
    assert "tiny-qwen2" not in ended.stderr.splitlines()[-1], "it is there"


def test_make_passes_arguments_to_every_benchmark():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^(bench[\w-]*):", makefile, flags=re.M)
    assert len(targets) >= 7
    for target in targets:
        shown = type_command(f"make -n -o install {target} ARGS='--rounds 1'", ROOT).stdout
        assert re.search(r"python benchmarks/\w+\.py --rounds 1$", shown, flags=re.M), f"{target}: {shown}"


@pytest.mark.slow
def test_the_clock_of_the_imports_stops_where_they_are_ready(tmp_path):
    seconds = start_time.seconds_to_ready(tmp_path, "import time; print('ready', flush=True); time.sleep(5)")
    assert 0 < seconds < 5
    with pytest.raises(SystemExit, match="ended with 3, and said b''"):
        start_time.seconds_to_ready(tmp_path, "raise SystemExit(3)")
    compile(start_time.IMPORTS, "imports", "exec")
    assert start_time.IMPORTS.splitlines()[-1] == 'print("ready", flush=True)'


@pytest.mark.parametrize("code", [0, 3])
def test_a_start_that_ends_without_a_step_is_told_and_not_waited_for(code, tmp_path):
    script = f"import sys; print('why it ended'); print('at last', file=sys.stderr); sys.exit({code})"
    metrics = tmp_path / "metrics.jsonl"
    with pytest.raises(SystemExit, match=rf"ended with {code} without a line in metrics.jsonl:\n") as ended:
        start_time.seconds_to_line([sys.executable, "-c", script], metrics, dict(os.environ))
    assert {"why it ended", "at last"} <= set(str(ended.value).splitlines()[1:])
    metrics.write_text("half a line")
    with pytest.raises(SystemExit, match="without a line"):
        start_time.seconds_to_line([sys.executable, "-c", "print(1)"], metrics, dict(os.environ))


def test_the_clock_of_a_start_stops_at_the_first_line(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    script = f"import time; print(1, file=open({str(metrics)!r}, 'w'), flush=True); time.sleep(1)"
    assert 0 < start_time.seconds_to_line([sys.executable, "-c", script], metrics, dict(os.environ)) < 1
    with pytest.raises(SystemExit, match=r"ended with 3:\nthe end$"):
        words = [sys.executable, "-c", "import sys; print('the end'); sys.exit(3)"]
        start_time.seconds_to_line(words, metrics, dict(os.environ))


def test_packing_is_measured_by_turns(monkeypatch, tmp_path):
    order = []

    def run(recipe, name, micro_batch, packing):
        order.append(packing)
        # Half as fast in the second round, for both.
        speed = (60 if packing else 100) / (2 if len(order) > 2 else 1)
        return {"trained_tokens_per_second": speed, "padding": 0.0 if packing else 0.1}

    monkeypatch.setattr(packing_speed, "run", run)
    found = packing_speed.compare(tmp_path / "recipe.yaml", 4, rounds=2)
    assert order == [False, True, True, False]
    assert found["times_padded"] == 0.6 and found["least_to_most"] == [0.6, 0.6]
    assert found["padded"] == {"trained_tokens_per_second": 75.0, "padding": 0.1}
