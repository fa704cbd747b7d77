"""The small benchmarks: both sides of a ratio are timed alike and by turns, and what is missing is said."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from checkout import ROOT, type_command

sys.path.insert(0, str(ROOT / "benchmarks"))

import packing_speed
import start_time
from contest import Contest, Size


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


def test_packing_is_measured_by_turns(monkeypatch):
    order = []

    def run(contest, label, micro_batch, packing):
        order.append(packing)
        # Half as fast in the second round, for both.
        speed = (60 if packing else 100) / (2 if len(order) > 2 else 1)
        return {"trained_tokens_per_second": speed, "padding": 0.0 if packing else 0.1}

    monkeypatch.setattr(packing_speed, "run", run)
    found = packing_speed.compare(None, 4, rounds=2)
    assert order == [False, True, True, False]
    assert found["times_padded"] == 0.6 and found["least_to_most"] == [0.6, 0.6]
    assert found["padded"] == {"trained_tokens_per_second": 75.0, "padding": 0.1}


@pytest.fixture
def contest(tmp_path):
    size = Size(tmp_path, tmp_path / "rows.json", 32, 4)
    recipe = tmp_path / "recipe.yaml"
    return Contest(
        "LoRA", tmp_path, recipe, tmp_path, size.rows, tmp_path, 900, nf4=False, size=size, steps=3, epochs=1
    )


def test_the_first_step_of_packing_is_not_timed(contest, monkeypatch, tmp_path):
    summary = {"padded_tokens": 1, "processed_tokens": 10, "final_loss": 2.0, "peak_memory_bytes": 2**20}
    seen = {}

    class Process:
        """finetune.py under the clock: three steps, of which the first takes as long as the others together."""

        def __init__(self, command, env, **_given):
            seen.update(command=command, environ=env)
            out = Path(command[command.index("--run-dir") + 1])
            out.mkdir()
            (out / "run_summary.json").write_text(json.dumps(summary))
            clock = {"ends": [20.0, 25.0, 30.0], "first_labels": 300, "counts_all": False, "losses": []}
            clock |= {"versions": {}, "trains": {}, "gradient_norm": 1.0, "moved": 1.0}
            out.with_name(f"{out.name}-rank0.json").write_text(json.dumps(clock))

        def poll(self):
            return 0

        terminate = wait = poll

    monkeypatch.setattr("subprocess.Popen", Process)
    found = packing_speed.run(contest, "4-0-True", 4, packing=True)
    assert found["trained_tokens_per_second"] == 60.0, "600 labels in 10 seconds, and not 900 in 30"
    assert found["padding"] == 0.1 and found["peak_memory_mib"] == 1
    assert seen["environ"]["OMP_NUM_THREADS"] == "1"
    words = ["training.per_device_train_batch_size=4", "data.packing=true"]
    assert seen["command"][-2:] == words and seen["command"][5] == "1", "one process"


@pytest.mark.parametrize("number", ["0", "32", "64", "100", "many"])
def test_rows_that_leave_too_few_timed_steps_are_refused(number, monkeypatch, capsys):
    files = ["--rows", str(ROOT / "data" / "quickstart.jsonl"), "--tokenizer", str(ROOT / "assets" / "tiny-qwen2")]
    monkeypatch.setattr(sys, "argv", ["packing_speed.py", *files, "--num-rows", number])
    monkeypatch.setattr(packing_speed, "where_and_when", lambda: pytest.fail("it measures"))
    with pytest.raises(SystemExit) as ended:
        packing_speed.main()
    line = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and "--num-rows" in line
    monkeypatch.setattr(sys, "argv", ["packing_speed.py", *files, "--micro-batches", "4", "5"])
    with pytest.raises(SystemExit) as ended:
        packing_speed.main()
    assert ended.value.code == 2 and "--micro-batches: invalid choice: 5" in capsys.readouterr().err.splitlines()[-1]
    if number in ("32", "64", "100"):
        said = "is no multiple of 32, the global batch, from 96 on: the first step is not timed, and 2 are to be"
        assert line.endswith(f"--num-rows {number} {said}")
