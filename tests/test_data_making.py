"""A preparation says what it does while it takes long, and stops before it fills the disk."""

from collections import namedtuple

import pytest

from tunebook.data import making
from tunebook.data.making import SlowProgress, check_room, say_waiting
from tunebook.errors import Refused

Usage = namedtuple("Usage", "free")


def test_a_quick_preparation_says_nothing_and_a_slow_one_not_too_much(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(making.time, "monotonic", lambda: now[0])
    report = SlowProgress()
    for second in range(1, 26):
        now[0] = float(second)
        report(second * 1000, 25_000)
    assert capsys.readouterr().out.splitlines() == [
        "preparing the data: 10,000 of 25,000 rows",
        "preparing the data: 20,000 of 25,000 rows",
    ]


@pytest.mark.parametrize(("rank", "lines"), [(None, 1), ("0", 1), ("3", 0)])
def test_one_process_of_a_machine_says_that_it_waits(monkeypatch, capsys, rank, lines):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    say_waiting()
    assert capsys.readouterr().out.count("another process of this machine") == lines


@pytest.mark.parametrize(
    ("written", "share", "free", "needed"),
    [
        (10e9, 0.5, 20e9, "30 GB"),  # 10 more, and 20 for the second copy
        (10e9, 1.0, 8e9, "10 GB"),
        (1e6, 0.01, 80e6, "199 MB"),  # less than half of what early rows foretell
        (500.0, 1.0, 0, "500 bytes"),
    ],
)
def test_a_disk_that_will_be_full_is_refused(tmp_path, monkeypatch, written, share, free, needed):
    monkeypatch.setattr(making.shutil, "disk_usage", lambda folder: Usage(free))
    with pytest.raises(Refused, match=rf"the prepared data needs about {needed} more, and the disk has .* left\. Free"):
        check_room(tmp_path / "partial", int(written), share)


@pytest.mark.parametrize(("written", "share", "free"), [(10e9, 0.5, 31e9), (1e6, 0.01, 100e6), (0, 0.5, 0)])
def test_a_disk_with_room_is_not(tmp_path, monkeypatch, written, share, free):
    monkeypatch.setattr(making.shutil, "disk_usage", lambda folder: Usage(free))
    check_room(tmp_path / "partial", int(written), share)
