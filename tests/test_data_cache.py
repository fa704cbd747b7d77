"""A cache folder is whole or absent, whoever makes it and however that ends."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tunebook.data.cache import cache_root, digest_of, file_sha256, load_manifest, load_or_make
from tunebook.errors import Problem, Refused


def write_rows(folder):
    (folder / "rows").write_text("many rows")
    return {"num_rows": 3}


def must_not_run(folder):
    raise AssertionError("made again")


def test_a_folder_is_made_once(tmp_path):
    folder = tmp_path / "tokens" / "key"
    made = load_or_make(folder, write_rows)
    assert made["num_rows"] == 3
    assert load_or_make(folder, must_not_run) == made
    assert (folder / "rows").read_text() == "many rows"


@pytest.mark.parametrize("damage", ["short", "gone", "other bytes", "no manifest", "half a manifest", "other facts"])
def test_a_damaged_folder_is_made_again(tmp_path, damage):
    folder = tmp_path / "key"
    load_or_make(folder, write_rows)
    if damage == "short":
        (folder / "rows").write_text("many")
    elif damage == "gone":
        (folder / "rows").unlink()
    elif damage == "other bytes":
        (folder / "rows").write_text("mANY ROWS")
    elif damage == "other facts":
        manifest = folder / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"num_rows": 3', '"num_rows": 4'))
    elif damage == "no manifest":
        (folder / "manifest.json").unlink()
    else:
        (folder / "manifest.json").write_text('{"num_rows": 3, "file')
    assert load_manifest(folder) is None
    assert load_or_make(folder, write_rows)["num_rows"] == 3
    assert (folder / "rows").read_text() == "many rows"


def test_a_failure_leaves_nothing(tmp_path):
    def fail(folder):
        (folder / "rows").write_text("half")
        raise Refused(Problem("half way"))

    with pytest.raises(Refused, match="half way"):
        load_or_make(tmp_path / "key", fail)
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == []


def test_what_a_killed_process_left_is_removed_and_not_read(tmp_path):
    left = tmp_path / "key.partial-0123"
    left.mkdir()
    (left / "rows").write_text("half")
    (tmp_path / "other.partial-0123").mkdir()
    load_or_make(tmp_path / "key", write_rows)
    assert not left.exists()
    assert (tmp_path / "other.partial-0123").exists()


def test_a_full_disk_is_refused_with_the_way_out(tmp_path):
    def fill(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(Refused, match=r"no space left for the prepared data.*TUNEBOOK_CACHE"):
        load_or_make(tmp_path / "key", fill)


def test_a_cache_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(Refused, match=r"the cache folder can't be written.*TUNEBOOK_CACHE"):
        load_or_make(tmp_path / "cache" / "tokens" / "key", write_rows)


@pytest.mark.parametrize("place", ["/proc/tunebook", "/dev/null/tunebook", "loop", "n" * 300])
def test_a_cache_where_no_folder_can_be_made_is_refused(tmp_path, place):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(Refused, match=r"the cache folder can't be written: .*TUNEBOOK_CACHE"):
        load_or_make(tmp_path / place / "tokens" / "key", must_not_run)


@pytest.mark.parametrize("error", [NotImplementedError("no flock"), OSError(errno.ENOLCK, "No locks available")])
def test_a_cache_on_a_disk_without_locks_is_refused(tmp_path, monkeypatch, error):
    def acquire(*args, **options):
        raise error

    monkeypatch.setattr("tunebook.data.cache.FileLock.acquire", acquire)
    with pytest.raises(Refused, match=r"the cache folder can't be written: No locks available.*TUNEBOOK_CACHE"):
        load_or_make(tmp_path / "key", must_not_run)


def test_a_cache_in_the_home_of_nobody_is_refused(monkeypatch):
    monkeypatch.setenv("TUNEBOOK_CACHE", "~nobody-of-that-name/cache")
    with pytest.raises(Refused, match=r"TUNEBOOK_CACHE: the cache folder has no place"):
        cache_root()


def test_an_error_in_the_data_is_not_blamed_on_the_cache(tmp_path):
    def fail(folder):
        raise PermissionError(errno.EACCES, "Permission denied", "/data/rows.jsonl")

    with pytest.raises(PermissionError):
        load_or_make(tmp_path / "key", fail)


def test_the_cache_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv("TUNEBOOK_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "tunebook"


def test_a_digest_is_remembered_until_the_file_changes_and_never_where_it_is_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "rows"
    path.write_text("many")
    digest = hashlib.sha256(b"many").hexdigest()
    assert file_sha256(path) == digest
    assert not (tmp_path / "cache").exists(), "a file this young may change without its times telling"
    monkeypatch.setattr("tunebook.data.cache._SETTLED_SECONDS", -1)
    assert file_sha256(path) == digest
    [remembered] = (tmp_path / "cache" / "digests").iterdir()
    remembered.write_text("0" * 64)
    assert file_sha256(path) == "0" * 64, "not read again"
    remembered.write_text("0" * 63)
    assert file_sha256(path) == digest
    os.utime(path, (1, 1))
    path.write_text("MANY")
    assert file_sha256(path) == hashlib.sha256(b"MANY").hexdigest()


def test_the_digest_depends_on_every_part():
    parts = {"content": "a", "max_length": 3}
    assert digest_of(parts) == digest_of(dict(reversed(parts.items())))
    assert len({digest_of(parts), digest_of(parts | {"max_length": 4}), digest_of(parts | {"content": "b"})}) == 3


MAKER = """
    import json, sys, time
    from pathlib import Path
    from tunebook.data.cache import load_or_make

    def make(folder):
        (folder / "rows").write_text("half")
        print("making", flush=True)
        time.sleep(float(sys.argv[2]))
        (folder / "rows").write_text("whole")
        return {}

    load_or_make(Path(sys.argv[1]), make)
    print((Path(sys.argv[1]) / "rows").read_text(), flush=True)
"""


def start_maker(folder, seconds):
    command = [sys.executable, "-c", textwrap.dedent(MAKER), str(folder), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_of_several_processes_one_makes_it_and_the_others_wait(tmp_path):
    processes = [start_maker(tmp_path / "key", 1) for _ in range(4)]
    outputs = [process.communicate(timeout=60)[0].split() for process in processes]
    assert sorted(outputs) == [["making", "whole"], ["whole"], ["whole"], ["whole"]]


@pytest.mark.slow
def test_a_kill_in_the_middle_leaves_nothing_that_is_used(tmp_path):
    first = start_maker(tmp_path / "key", 600)
    assert first.stdout.readline() == "making\n"
    waiting = start_maker(tmp_path / "key", 0)
    time.sleep(0.5)
    assert waiting.poll() is None
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    assert waiting.communicate(timeout=60)[0].split() == ["making", "whole"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.lock"]
    assert json.loads((tmp_path / "key" / "manifest.json").read_text())["file_sizes"] == {"rows": 5}
