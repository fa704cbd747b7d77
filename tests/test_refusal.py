"""A refusal is said once: pretended ranks are plain python processes that share this process as their launcher."""

import json
import os
import subprocess
import sys
import time

import pytest

from tunebook.errors import Problem, Refused, TrainingFailed, is_out_of_memory
from tunebook.launching.refusal import exit_refused
from tunebook.system.secret_text import hide_tokens
from tunebook.system.spelling import near_words

RANK = """
import json, os, sys, tempfile, time
from tunebook.launching import refusal
from tunebook.errors import Problem, Refused
delay, patience, messages = json.loads(sys.argv[1])
tempfile.tempdir = os.environ["MEETING_PLACE"]
refusal.PATIENCE_SECONDS = patience
assert "torch" not in sys.modules
time.sleep(delay)
refusal.exit_refused(Refused([Problem(message, "fix it") for message in messages]))
"""


def start_rank(folder, rank, size, messages=("a is wrong",), delay=0.0, patience=10.0, **changes):
    environ = {
        "PATH": os.environ["PATH"],
        "MEETING_PLACE": str(folder),
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_PORT": 29500,
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": 0,
    } | changes
    return subprocess.Popen(
        [sys.executable, "-c", RANK, json.dumps([delay, patience, messages])],
        env={name: str(value) for name, value in environ.items() if value is not None},
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(ranks):
    """Return what each rank wrote to stderr and how long all took; each must end with 2."""
    started = time.monotonic()
    texts = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2] * len(ranks), texts
    return texts, time.monotonic() - started


@pytest.mark.parametrize("size", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_one_report_whatever_the_number_of_ranks(tmp_path, size):
    texts, _ = finish([start_rank(tmp_path, rank, size, ["a is wrong", "b is wrong"]) for rank in range(size)])
    assert texts[0] == "refused: 2 problems\n  a is wrong. fix it\n  b is wrong. fix it\n"
    assert texts[1:] == [""] * (size - 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("delays", [(0, 1.5), (1.5, 0)])
def test_ranks_leave_together_however_far_apart_they_come(tmp_path, delays):
    ranks = [start_rank(tmp_path, rank, 2, delay=delay) for rank, delay in enumerate(delays)]
    ended = {}
    while len(ended) < 2:
        for rank, process in enumerate(ranks):
            if process.poll() is not None:
                ended.setdefault(rank, time.monotonic())
        time.sleep(0.005)
    texts, _ = finish(ranks)
    assert texts == ["refused: a is wrong. fix it\n", ""]
    assert abs(ended[0] - ended[1]) < 0.5  # not the 1.5 s they came apart


@pytest.mark.slow
def test_the_launchers_term_does_not_change_the_code(tmp_path):
    """torch's agent sends TERM to the ranks that are still there after the first exit."""
    ranks = [start_rank(tmp_path, 0, 2), start_rank(tmp_path, 1, 2, delay=1.0)]
    while not list(tmp_path.glob("tunebook-refusal-*/said")):
        time.sleep(0.01)
    ranks[0].terminate()
    assert finish(ranks)[0] == ["refused: a is wrong. fix it\n", ""]


def test_a_rank_with_other_problems_adds_them(tmp_path):
    texts, _ = finish(
        [
            start_rank(tmp_path, 0, 4, ["shared"]),
            start_rank(tmp_path, 1, 4, ["shared", "only here"]),
            start_rank(tmp_path, 2, 4, ["shared", "on two"]),
            start_rank(tmp_path, 3, 4, ["shared", "on two"]),
        ]
    )
    assert texts[0] == "refused: shared. fix it\n"
    assert texts[1] == "rank 1: refused: only here. fix it\n"
    assert sorted(texts[2:]) in (
        ["", "rank 2: refused: on two. fix it\n"],
        ["", "rank 3: refused: on two. fix it\n"],
    )


@pytest.mark.slow
def test_a_rank_that_refuses_alone_says_it_itself(tmp_path):
    texts, seconds = finish([start_rank(tmp_path, 1, 2, patience=0.5)])
    assert texts == ["rank 1: refused: a is wrong. fix it\n"]
    assert seconds < 5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_rank_0_alone_says_it_at_once_and_waits_for_the_others(tmp_path):
    rank = start_rank(tmp_path, 0, 2, patience=2.0)
    assert rank.stderr.readline() == "refused: a is wrong. fix it\n"
    assert rank.poll() is None
    finish([rank])
    assert list(tmp_path.iterdir()) == []


def test_another_machine_names_rank_and_host(tmp_path):
    ranks = [start_rank(tmp_path, n, 4, RANK=2 + n, LOCAL_WORLD_SIZE=2, GROUP_RANK=1) for n in range(2)]
    texts, _ = finish(ranks)
    assert texts[0].startswith("rank 2 on ")
    assert texts[0].endswith(": refused: a is wrong. fix it\n")
    assert texts[1] == ""


@pytest.mark.parametrize("size", [1, 2])
def test_after_a_restart_it_is_not_said_again(tmp_path, size):
    run = tmp_path / "torchelastic" / "none_x"

    def attempt(number, messages):
        names = {"TORCHELASTIC_RESTART_COUNT": number, "TORCHELASTIC_MAX_RESTARTS": 2}
        files = [run / f"attempt_{number}" / str(rank) / "error.json" for rank in range(size)]
        for file in files:
            file.parent.mkdir(parents=True)
        ranks = [
            start_rank(tmp_path, rank, size, messages, TORCHELASTIC_ERROR_FILE=files[rank], **names)
            for rank in range(size)
        ]
        return finish(ranks)[0][0]

    assert attempt(0, ["a is wrong"]) == "refused: a is wrong. fix it\n"
    assert attempt(1, ["a is wrong"]) == ""
    assert attempt(2, ["b is wrong"]) == "refused: b is wrong. fix it\n"  # news are said


def test_a_restart_without_a_memory_is_silent(tmp_path):
    texts, _ = finish([start_rank(tmp_path, rank, 2, TORCHELASTIC_RESTART_COUNT=1) for rank in range(2)])
    assert texts == ["", ""]


def test_tasks_of_mpirun_and_srun_meet_too(tmp_path):
    torch_names = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    ranks = [
        start_rank(tmp_path, n, 2, **torch_names, SLURM_PROCID=n, SLURM_LOCALID=n, SLURM_STEP_TASKS_PER_NODE="2(x3)")
        for n in range(2)
    ]
    assert finish(ranks)[0] == ["refused: a is wrong. fix it\n", ""]


@pytest.mark.parametrize("changes", [{"LOCAL_RANK": None}, {"LOCAL_WORLD_SIZE": "many", "WORLD_SIZE": None}])
def test_broken_variables_make_nobody_wait(tmp_path, changes):
    texts, seconds = finish([start_rank(tmp_path, 0, 2, **changes)])
    assert texts == ["refused: a is wrong. fix it\n"]
    assert seconds < 5


def test_nowhere_to_meet_is_said_by_each(tmp_path):
    texts, _ = finish([start_rank(tmp_path / "missing", rank, 2) for rank in range(2)])
    assert texts == ["refused: a is wrong. fix it\n", "rank 1: refused: a is wrong. fix it\n"]


def test_a_closed_pipe_gives_no_traceback_and_the_same_code():
    code = (
        "import sys, time; sys.stdin.readline(); print('x' * 10);"
        "from tunebook.errors import Problem, Refused; from tunebook.launching.refusal import exit_refused;"
        "exit_refused(Refused(Problem('a is wrong')))"
    )
    environ = {"PATH": os.environ["PATH"]}  # without PYTHONUNBUFFERED: the line is still to be flushed
    pipe = subprocess.PIPE
    for closed in (["stdout"], ["stdout", "stderr"]):
        with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, env=environ) as rank:
            for name in closed:
                getattr(rank, name).close()
            rank.stdin.write(b"go\n")
            rank.stdin.close()
            said = b"" if "stderr" in closed else rank.stderr.read()
        assert rank.returncode == 2, closed
        assert said == (b"" if "stderr" in closed else b"refused: a is wrong\n")


def test_in_process_it_is_a_system_exit(capsys):
    with pytest.raises(SystemExit) as left:
        exit_refused(Refused(Problem("a is wrong", where="x.yaml:3")), {})
    assert left.value.code == 2
    assert capsys.readouterr().err == "refused: x.yaml:3: a is wrong\n"


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("shapes do not match"), False),
        (Refused(Problem("not enough memory for auto")), False),
        (TrainingFailed("x could not be saved: Cannot allocate memory"), False),
    ],
    ids=repr,
)
def test_out_of_memory_is_what_others_say_of_it_not_what_is_told_of_it_already(error, is_so):
    assert is_out_of_memory(error) == is_so


def test_a_report_ends_where_nobody_reads_on():
    problems = [Problem(f"number {number} is wrong", "mend it") for number in range(130)]
    lines = Refused(problems).render().splitlines()
    assert lines[0] == "refused: 130 problems" and lines[-1].strip() == "and 30 more" and len(lines) == 102
    [line] = Refused(Problem("x" * 100_000 + " is wrong", "Mend it", "here.yaml:3", "training")).render().splitlines()
    assert len(line) < 5000 and line.startswith("refused: here.yaml:3: training: xxx") and line.endswith("Mend it")


def test_what_is_too_long_for_a_name_is_like_none():
    assert near_words("training", ["trainings", "model"]) == ["trainings"]
    assert near_words("training" * 1000, ["trainings", "training" * 1000]) == []


def test_a_password_is_hidden_and_a_long_word_costs_no_square_of_its_length():
    assert (
        hide_tokens("see https://me:secret@host/x, git+ssh://me@host") == "see https://***@host/x, git+ssh://***@host"
    )
    assert hide_tokens("x" * 2_000_000) == "x" * 2_000_000  # which took hours
