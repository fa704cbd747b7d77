"""The benchmarks' files: one that can't be written is told of before anything is measured; none is left in parts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from checkout import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import data_speed
import loss_memory
import packing_speed
import process_scaling
import result_files
import run_all
import start_time

FILES = ["--rows", str(ROOT / "data" / "quickstart.jsonl"), "--tokenizer", str(ROOT / "assets" / "tiny-qwen2")]
# What each measures with, and the words that it takes.
ALL = {
    data_speed: ("install_trl", FILES),
    loss_memory: ("compare", []),
    packing_speed: ("where_and_when", FILES),
    process_scaling: ("where_and_when", FILES),
    run_all: ("run_everything", FILES),
    start_time: ("compare", []),
}


class MeasuredError(Exception):
    """Raised where measuring would begin."""


def begin(module, monkeypatch, *words):
    measures, files = ALL[module]

    def measured(*_given):
        raise MeasuredError

    monkeypatch.setattr(module, measures, measured)
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *files, *words])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    module.main()


each = pytest.mark.parametrize("module", ALL, ids=lambda module: module.__name__)


@each
def test_a_folder_that_is_not_there_is_made_before_anything_is_measured(module, monkeypatch, tmp_path):
    with pytest.raises(MeasuredError):
        begin(module, monkeypatch, "--results", str(tmp_path / "new" / "deep" / "found.json"))
    assert (tmp_path / "new" / "deep").is_dir()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "and no file is left behind"


@each
def test_a_place_that_cannot_be_written_is_refused_in_one_line(module, monkeypatch, tmp_path, capsys):
    (tmp_path / "a_file").write_text("kept")
    for place, said in (
        (tmp_path / "a_file" / "found", "a_file"),
        (Path("/proc") / "found", "which is the system's own"),
        (tmp_path / ("n" * 300), "has a name that is too long"),
    ):
        with pytest.raises(SystemExit) as ended:
            begin(module, monkeypatch, "--results", str(place))
        assert ended.value.code == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith(f"{module.__name__}.py: error: --results: ") and said in line
    assert (tmp_path / "a_file").read_text() == "kept"


@pytest.mark.parametrize("module", [one for one in ALL if one is not run_all], ids=lambda module: module.__name__)
def test_a_folder_is_no_file_of_results_and_no_rounds_measure_nothing(module, monkeypatch, tmp_path, capsys):
    for words, said in ((["--results", str(tmp_path)], "is a folder"), (["--rounds", "0"], "0 is no whole number")):
        with pytest.raises(SystemExit) as ended:
            begin(module, monkeypatch, *words)
        assert ended.value.code == 2 and said in capsys.readouterr().err.splitlines()[-1]


def test_the_gpu_benchmark_says_so_too(tmp_path):
    (tmp_path / "a_file").write_text("")
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--tiny", "--out", tmp_path / "a_file"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].endswith("a_file is no folder")


def test_results_are_whole_or_as_they_were(monkeypatch, tmp_path, capsys):
    path = tmp_path / "found.json"
    result_files.write_json(path, {"speed": 1})
    assert json.loads(path.read_text()) == {"speed": 1}

    def full(_handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(SystemExit, match=r"found.json could not be saved: No space left on device"):
        result_files.write_json(path, {"speed": 2})
    assert json.loads(path.read_text()) == {"speed": 1} and list(tmp_path.iterdir()) == [path]
    assert json.loads(capsys.readouterr().out) == {"speed": 2}, "hours of measuring are not lost with it"


def test_the_results_of_an_earlier_run_outlive_a_full_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(run_all, "render", lambda found: found["page"])
    monkeypatch.setattr(run_all, "broken_promises", lambda _padding: [])
    found = {"date": "2026-01-02", "padding": {}, "contests": {}, "page": "the first"}
    run_all.write_results(found, tmp_path)
    kept = (tmp_path / "2026-01-02.json").read_text()

    def full(_handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(SystemExit, match="No space left"):
        run_all.write_results({**found, "page": "the second"}, tmp_path)
    assert (tmp_path / "2026-01-02.json").read_text() == kept and (
        tmp_path / "2026-01-02.md"
    ).read_text() == "the first"


@each
def test_all_write_by_what_leaves_no_parts(module):
    [writes] = {vars(module)[name] for name in ("write_json", "write_text") if name in vars(module)}
    assert writes in (result_files.write_json, result_files.write_text)
    assert ".results.write_text(" not in Path(module.__file__).read_text(encoding="utf-8")
