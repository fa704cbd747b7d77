"""`tunebook launch` ends with the ranks' own code, adds no noise, forwards signals and leaves no orphan."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launched_ranks import LAUNCHER, clean_environ, launch_in_process
from tunebook.errors import Refused
from tunebook.launching.launch import find_script, launch

# One rank that ends as it is told and says in a file what it is, or was asked to do.
RANK_SCRIPT = """
import os, signal, sys, time
from pathlib import Path

folder, how = Path(sys.argv[1]), sys.argv[2]
rank = os.environ["RANK"]

def leave(code):
    (folder / f"{how}-{rank}").write_text(str(code))
    sys.exit(code)

def stop(number, frame):
    leave(75)

if how == "refuse":
    from tunebook.errors import Problem, Refused
    from tunebook.launching.refusal import exit_refused
    try:
        exit_refused(Refused([Problem("a is wrong"), Problem("b is wrong")]))
    except SystemExit as left:
        leave(left.code)
if how == "interrupted":
    leave(75)
if how == "crash":
    raise ValueError("this rank is broken")
if how == "first":
    if rank == "1":
        leave(3)
    signal.signal(signal.SIGTERM, stop)
    time.sleep(60)
if how == "killed":
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
if how == "arguments":
    Path(folder, f"{how}-{rank}").write_text(repr(sys.argv[3:]))
if how == "wait":
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    (folder / f"ready-{rank}").write_text(f"{os.getpid()} {sys.stdout.isatty()}")
    time.sleep(60)
"""


@pytest.mark.slow
def test_launch_ends_with_the_code_of_the_ranks(tmp_path):
    hows = ["refuse", "interrupted", "crash", "first", "killed"]
    runs = [("rank.py", [how], 2) for how in hows]
    runs.append(("rank.py", ["arguments", "$HOME", "$$", "${local_rank}", "a b"], 2))
    (tmp_path / "rank.py").write_text(RANK_SCRIPT)
    done = launch_in_process(tmp_path, runs, clean_environ())
    codes = json.loads((tmp_path / "codes.json").read_text())
    assert codes == {"refuse": 2, "interrupted": 75, "crash": 1, "first": 3, "killed": 1, "arguments": 0}
    for how, code in (("refuse", "2"), ("interrupted", "75")):
        assert [(tmp_path / f"{how}-{rank}").read_text() for rank in range(2)] == [code, code]
    assert (tmp_path / "arguments-1").read_text() == "['$HOME', '$$', '${local_rank}', 'a b']"
    said = dict(part.split("\n", 1) for part in done.stderr.split("-- ")[1:])
    assert said["refuse"] == "refused: 2 problems\n  a is wrong\n  b is wrong\n"
    assert said["interrupted"] == said["first"] == said["arguments"] == ""
    assert "ValueError: this rank is broken" in said["crash"]
    assert "torch" not in said["crash"]  # no trace but the rank's own
    assert said["killed"] == "tunebook launch: rank 1 was ended by signal 9 (Killed)\n"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_launch_forwards_a_signal_and_leaves_no_orphan(tmp_path, number):
    (tmp_path / "rank.py").write_text(RANK_SCRIPT)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    runs = json.dumps([("rank.py", ["wait"], 2)])
    terminal, ours = pty.openpty()
    command = [sys.executable, str(tmp_path / "launcher.py"), str(tmp_path), runs]
    launcher = subprocess.Popen(command, env=clean_environ(), stdout=ours, stderr=subprocess.PIPE, text=True)
    ready = [tmp_path / f"ready-{rank}" for rank in range(2)]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in ready):
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    launcher.send_signal(number)
    _, said = launcher.communicate(timeout=60)
    os.close(terminal)
    os.close(ours)
    assert (launcher.returncode, said) == (75, "-- wait\n")
    for rank, file in enumerate(ready):
        process, is_terminal = file.read_text().split()
        assert not Path("/proc", process).exists()
        assert is_terminal == "True"  # progress bars work
        assert (tmp_path / f"wait-{rank}").read_text() == "75"


def test_launch_refuses_what_cannot_run(tmp_path):
    with pytest.raises(Refused, match="at least 1 process runs, got 0"):
        launch(tmp_path / "finetune.py", [], 0)
    with pytest.raises(Refused, match="no such file"):
        launch(tmp_path / "finetune.py", [], 2)


def test_find_script_prefers_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "finetune.py").touch()
    monkeypatch.chdir(tmp_path)
    assert find_script().resolve() == tmp_path / "finetune.py"


def test_find_script_falls_back_to_the_checkout_and_refuses_without_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkout = tmp_path / "checkout"
    monkeypatch.setattr("tunebook.__file__", str(checkout / "src" / "tunebook" / "__init__.py"))
    with pytest.raises(Refused, match=r"no finetune\.py in .* and .*checkout"):
        find_script()
    checkout.mkdir()
    (checkout / "finetune.py").touch()
    assert find_script() == checkout / "finetune.py"
