"""Seconds of training alone, and the peak of a process's own memory."""

import time

import pytest

from tunebook.training.measuring import PeakMemory, Stopwatch, anonymous_bytes

pytestmark = pytest.mark.slow


def test_a_pause_does_not_count():
    watch = Stopwatch()
    with watch.paused():  # before the start
        time.sleep(0.01)
    assert watch.seconds == 0
    watch.start()
    time.sleep(0.02)
    with watch.paused():
        time.sleep(0.3)
    watch.stop()
    watch.stop()
    assert 0.02 <= watch.seconds < 0.25


def test_the_peak_is_seen_though_it_is_gone_at_the_end():
    if anonymous_bytes() is None:
        pytest.skip("this system has no /proc/self/status")
    memory = PeakMemory("cpu")
    before = memory.stop()
    memory = PeakMemory("cpu")
    block = bytearray(b"x") * (200 * 1024 * 1024)
    time.sleep(0.3)
    del block
    after = memory.stop()
    assert before and after and 190e6 < after - before < 260e6
