"""The table of the training benchmark: ratios inside the rounds, losing rows first, and each promise held to."""

import json
import math
import subprocess
import sys

import pytest

from checkout import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from contest import CONTESTANTS, Run, launched
from padding_share import broken_promises
from results_table import CONTESTS, broken_ratios, median_interval, promised, ratio_rows, ratios_of, render, unmeasured
from run_all import differences, goes_with, main, read_arguments, write_results

FILES = ("--rows", str(ROOT / "data" / "quickstart.jsonl"), "--tokenizer", str(ROOT / "assets" / "tiny-qwen2"))
WHERE = {
    "date": "2026-01-02",
    "command": "python benchmarks/run_all.py",
    "commit": "0123456789abcdef",
    "uncommitted_changes": False,
    "machine": {"cpu": "a processor", "cores": 2, "load_average": (0.1,)},
    "versions": {"torch": "2"},
}


def runs(*speeds):
    return [Run(labels=1000, seconds=1000 / speed) for speed in speeds]


def check(**other):
    trains = {"numbers": 7, "types": ["torch.float32, gradient torch.float32"], "optimizer": "AdamW"}
    trains |= {"settings": [{"lr": 1e-3, "fused": True}]}
    return {
        "first_loss": 9.0,
        "gradient_norm": 2.0,
        "moved": 0.5,
        "versions": {"torch": "2"},
        "trains": trains,
        **other,
    }


def contest(**speeds):
    names = {"ours": "finetune.py", "by_hand": "train_ddp.py", "trl": "trl sft", "lightning": "Lightning, DDP"}
    found = ratios_of({names[name]: runs(*values) for name, values in speeds.items()}, "finetune.py")
    return {
        "ratios": found,
        "errors": {},
        "checks": {"finetune.py": check()},
        "where": WHERE,
        "load_average_after": (2.0,),
        "commands": {"finetune.py": "run it"},
        "model_rows_and_batch": "rows",
        "rounds": 3,
        "pairs": 3,
        "steps": 6,
    }


def test_a_ratio_is_the_median_of_those_inside_the_rounds():
    # A machine that is half as fast in round 2 is so for both.
    found = contest(ours=[100, 50, 90], by_hand=[100, 50, 100])["ratios"]
    assert found["train_ddp.py"]["ratio"] == {"median": 1.0, "least": 0.9, "most": 1.0}
    assert found["finetune.py"] == {"tokens_per_second": {"median": 90, "least": 50, "most": 100}}


def test_the_closest_two_have_more_rounds_and_an_interval():
    ratios = [0.90, 0.95, 0.96, 0.97, 0.98, 0.99, 1.00, 1.01, 1.02, 1.10]
    assert median_interval(ratios) == (0.95, 1.02), "the second and the last but one of ten: 97.9 %"
    assert median_interval(ratios[:5]) is None and median_interval(ratios[:6]) == (0.90, 0.99)
    found = contest(ours=[100] * 10, by_hand=[100 / one for one in ratios], trl=[50] * 5)["ratios"]
    assert found["train_ddp.py"]["ratio"]["median_within"] == [0.95, 1.02]
    assert found["trl sft"]["ratio"] == {"median": 2.0, "least": 2.0, "most": 2.0}


def test_another_training_is_told_by_its_first_step_and_by_where_it_ends():
    ours = check()
    assert differences(check(first_loss=9.00001, gradient_norm=2.001, moved=0.5001), ours, 1e-3) == []
    assert differences(check(gradient_norm=2.2), ours, 0.15) == [] != differences(check(gradient_norm=2.2), ours, 1e-3)
    in_bfloat16 = {**ours["trains"], "types": ["torch.bfloat16, gradient torch.bfloat16"]}
    slower = {**ours["trains"], "settings": [{"lr": 1e-4, "fused": True}]}
    for other, named in (
        ({"trains": in_bfloat16}, "types"),
        ({"trains": slower}, "settings"),
        ({"trains": {**ours["trains"], "numbers": 6}}, "numbers 6, not 7"),
        ({"first_loss": 9.001}, "first_loss"),
        ({"gradient_norm": 4.0}, "gradient_norm 4, not 2"),
        ({"moved": 0.05}, "moved"),
        ({"moved": math.nan}, "moved nan"),
    ):
        [apart] = differences(check(**other), ours, 1e-3)
        assert apart.startswith(named)


@pytest.mark.parametrize(
    ("name", "larger", "tiny"),
    [
        ("train_ddp.py", 0.97, 0.97),
        ("trl sft", 2.5, 1),
        ("SFTTrainer, batch_rebalance", 1.5, 1),
        ("Lightning, DDP", 1, 1),
    ],
)
def test_what_is_promised_of_whom(name, larger, tiny):
    assert promised("larger, QLoRA", name) == larger and promised("tiny, LoRA", name) == tiny


def test_losing_rows_come_first_and_a_promise_that_is_not_kept_is_named():
    contests = {
        "larger, LoRA": contest(ours=[100], by_hand=[105], trl=[50], lightning=[80]),
        "tiny, LoRA": contest(ours=[100], by_hand=[102], trl=[50], lightning=[125]),
    }
    assert [row[:2] for row in ratio_rows(contests)] == [
        ("tiny, LoRA", "Lightning, DDP"),
        ("larger, LoRA", "train_ddp.py"),
        ("tiny, LoRA", "train_ddp.py"),
        ("larger, LoRA", "Lightning, DDP"),
        ("larger, LoRA", "trl sft"),
        ("tiny, LoRA", "trl sft"),
    ]
    broken = broken_ratios(contests)
    assert broken == [
        "larger, LoRA: 0.95 times train_ddp.py, promised 0.97",
        "larger, LoRA: 2.00 times trl sft, promised 2.5",
        "tiny, LoRA: 0.80 times Lightning, DDP, promised 1",
    ]
    contests["tiny, LoRA"]["errors"]["trl sft"] = "its first loss is 1.0e-01 off: not the same training"
    assert broken_ratios(contests)[-1].startswith("tiny, LoRA: trl sft: its first loss")
    contests["tiny, LoRA"]["errors"] = {"trl sft": "not installed: no room"}
    assert broken_ratios(contests)[-1] == "tiny, LoRA: trl sft: not installed: no room", "absent is not kept, either"


def test_padding_is_held_to_its_promise_too():
    kept = {4: {"laid out": 0.05, "packed": 0.01}, 16: {"laid out": 0.2, "packed": 0.0}}
    assert broken_promises(kept) == []
    broken = {4: {"laid out": 0.051, "packed": 0.0}, 16: {"laid out": 0.2, "packed": 0.02}}
    assert broken_promises(broken) == [
        "padding at micro-batch 4 is 5.1%, promised at most 5%",
        "padding packed at micro-batch 16 is 2.0%, promised at most 1%",
    ]


def test_the_page_has_the_table_and_what_was_not_kept():
    found = {
        **WHERE,
        "settings": {"processes": 2, "threads": 1},
        "padding": {4: {"laid out": 0.038, "packed": 0.0, "random": 0.37}},
        "contests": {"tiny, LoRA": contest(ours=[100], by_hand=[200])},
        "broken_promises": ["tiny, LoRA: 0.50 times train_ddp.py, promised 0.97"],
    }
    page = render(found)
    row = "| tiny, LoRA | train_ddp.py | 0.50 | 0.50 to 0.50 | 0.97, **not kept** | 200 (200 to 200) |"
    assert (
        row in page
        and "| 4 | 3.8% | 0.0% | 37.0% |" in page
        and "- tiny, LoRA: 0.50 times train_ddp.py, promised 0.97\n" in page
    )
    assert "- larger, LoRA\n" in page and "tiny, LoRA: trl sft; SFTTrainer, batch_rebalance; Lightning, DDP" in page
    assert "commit 0123456789; load average 0.1 before and 2.0 after" in page
    assert "All train 7 numbers (float32, gradient float32) by AdamW (lr 0.001, fused True):" in page


def everything():
    speeds = ratios_of({name: runs(300 if name == "finetune.py" else 100) for name in CONTESTANTS}, "finetune.py")
    return {name: {**contest(), "ratios": dict(speeds)} for name in CONTESTS}


def test_promises_are_all_kept_only_where_all_were_measured(tmp_path):
    found = {
        **WHERE,
        "settings": {"processes": 2, "threads": 1},
        "padding": {4: {"laid out": 0.038, "packed": 0.0, "random": 0.37}},
        "contests": everything(),
    }
    page = write_results(found, tmp_path)
    assert page.endswith("\n\nAll promises are kept.\n") and found["not_measured"] == []
    del found["contests"]["larger, QLoRA"], found["contests"]["tiny, LoRA"]["ratios"]["trl sft"]
    found["contests"]["tiny, QLoRA"]["errors"] = {"Lightning, DDP": "not installed"}
    del found["contests"]["tiny, QLoRA"]["ratios"]["Lightning, DDP"]
    page = write_results(found, tmp_path)
    assert found["not_measured"] == ["larger, QLoRA", "tiny, LoRA: trl sft"], "one that failed is told as not kept"
    assert "All promises" not in page and "What was measured keeps" not in page
    assert page.endswith("is not known:\n\n- larger, QLoRA\n\n- tiny, LoRA: trl sft\n")
    del found["contests"]["tiny, QLoRA"]
    assert write_results(found, tmp_path).endswith("\n\nWhat was measured keeps its promises.\n")
    kept = json.loads((tmp_path / "2026-01-02.json").read_text(encoding="utf-8"))
    assert kept["not_measured"] == ["larger, QLoRA", "tiny, LoRA: trl sft", "tiny, QLoRA"] == found["not_measured"]
    assert unmeasured({}) == list(CONTESTS)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--rounds", "1", "--steps", "2"), "--rounds, --steps"),
        (("--pairs", "1"), "--pairs"),
        (("--contests", "tiny, LoRA"), "--contests"),
        (("--contestants", "finetune.py", "train_ddp.py"), "--contestants"),
        (FILES, "--rows, --tokenizer"),
    ],
)
def test_a_trial_needs_a_folder_of_its_own(words, named, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["run_all.py", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    line = capsys.readouterr().err.splitlines()[-1]
    said = "not the whole benchmark, whose results stay; give --results FOLDER"
    assert (ended.value.code, line) == (2, f"run_all.py: error: {named}: {said}")
    monkeypatch.setattr(sys, "argv", ["run_all.py", *words, *FILES, "--results", str(tmp_path)])
    assert read_arguments().results == tmp_path


def test_the_whole_benchmark_has_the_folder_of_results(monkeypatch):
    monkeypatch.setattr("run_all.check_files", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--rounds", "5", "--contestants", *reversed(CONTESTANTS)])
    given = read_arguments()
    assert given.results == ROOT / "benchmarks" / "results" and given.contestants == list(CONTESTANTS)


@pytest.mark.parametrize("words", [("--rounds", "0"), ("--pairs", "many"), ("--steps", "1"), ("--steps", "-3")])
def test_a_number_that_measures_nothing_is_refused_in_one_line(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run_all.py", *words])
    with pytest.raises(SystemExit) as ended:
        read_arguments()
    assert ended.value.code == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith(f"{words[1]} is no whole number from {1 + (words[0] == '--steps')} on")
    )


def test_a_contest_of_the_same_day_stays_where_the_code_is_the_same():
    one = {"name": "tiny, LoRA", "where": WHERE}
    assert goes_with(one, WHERE, ["tiny, QLoRA"]) and not goes_with(one, WHERE, ["tiny, LoRA"])
    assert not goes_with(one, {**WHERE, "commit": "fedcba"}, []) and not goes_with({}, WHERE, [])
    assert not goes_with({**one, "where": {**WHERE, "uncommitted_changes": True}}, WHERE, [])


def test_a_contestant_is_run_as_two_processes_under_the_clock():
    command = launched(["python", "-m", "a.module", "--flag"], ROOT / "out")
    assert command[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    assert command[6:] == [str(ROOT / "benchmarks" / "clock.py"), str(ROOT / "out"), "-m", "a.module", "--flag"]


@pytest.mark.slow
@pytest.mark.long
def test_both_programs_of_ours_are_measured_and_their_losses_agree(tmp_path):
    words = [
        "--rounds",
        "1",
        "--pairs",
        "1",
        "--steps",
        "3",
        "--contests",
        "tiny, QLoRA",
        "--contestants",
        "finetune.py",
        "train_ddp.py",
    ]
    command = [sys.executable, ROOT / "benchmarks" / "run_all.py", *words, *FILES, "--results", tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 or "promised" in ended.stderr, ended.stderr
    [page] = tmp_path.glob("*.md")
    assert "- tiny, QLoRA: trl sft; SFTTrainer" in page.read_text() and "All promises are kept" not in page.read_text()
    assert "| tiny, QLoRA | train_ddp.py | " in page.read_text() and "Traceback" not in ended.stderr
