"""Signals of a process: at once outside, asked inside, at once when they come twice, and not for its children."""

import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """
import os, signal, sys, time
from tunebook.system.signals import asked_signal, deferred_signals, ignore_signals, signal_name, watch_signals

def send(name):
    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(0.3)

watch_signals()
"""


def end_of(body):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + body], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"])
def test_outside_a_signal_ends_the_process_with_75(name):
    code, out, err = end_of(f"send('{name}'); print('went on')")
    assert (code, out) == (75, "") and f"interrupted by {name}" in err and "Traceback" not in err


def test_inside_it_only_asks():
    code, out, _ = end_of(
        "with deferred_signals():\n"
        "    before = asked_signal()\n"
        "    send('SIGTERM')\n"
        "    print(before, signal_name(asked_signal()))"
    )
    assert (code, out) == (0, "None SIGTERM\n")


def test_a_second_one_ends_at_once():
    code, out, err = end_of("with deferred_signals():\n    send('SIGTERM'); send('SIGINT'); print('went on')")
    assert (code, out) == (128 + signal.SIGINT, "") and "a second time" in err


def test_it_is_heard_while_the_main_thread_stands_in_native_code():
    began = time.monotonic()
    # As in a collective whose partner is gone: no Python handler would run before it returns.
    body = "import threading, ctypes\nthreading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
    code, _, _ = end_of(body + "while True: ctypes.CDLL(None).sleep(60)")
    assert code == 75 and time.monotonic() - began < 20


def test_a_process_that_failed_ends_with_its_own_code_whatever_the_launcher_sends():
    body = (
        "import threading\n"
        "from tunebook.system.signals import wait_for_signal\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "print(wait_for_signal(20)); sys.exit(1)"
    )
    assert end_of(body)[:2] == (1, "True\n")


def test_when_all_is_saved_it_is_ignored():
    body = "with deferred_signals():\n    ignore_signals(); send('SIGTERM')\nprint('in order'); sys.exit(75)"
    code, out, _ = end_of(body)
    assert (code, out) == (75, "in order\n")


def test_a_child_that_is_told_to_end_does_not_end_its_parent():
    body = """
child = os.fork()
if child == 0:
    time.sleep(60)
time.sleep(0.3)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
time.sleep(0.3)
"""
    code, out, _ = end_of(body)
    assert (code, out) == (0, f"{-signal.SIGTERM}\n")


def test_a_run_under_nohup_stays_deaf_to_the_end_of_its_terminal():
    script = SCRIPT.replace("watch_signals()\n", "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nwatch_signals()\n")
    done = subprocess.run(
        [sys.executable, "-c", script + "send('SIGHUP'); print('went on')"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "went on\n")
