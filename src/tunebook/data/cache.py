"""A folder of prepared data: made once per machine by one process, whole or absent."""

import errno
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tunebook.data.making import MORE_ROOM, SILENT_SECONDS, say_waiting
from tunebook.errors import Problem, Refused
from tunebook.system.writing import write_whole

_MANIFEST = "manifest.json"
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Long waits are normal (another process tokenises a large data set), so look rarely.
_POLL_SECONDS = 0.2
# A file that is written again within one tick of the disk's clock has the same times, so a young one isn't remembered.
_SETTLED_SECONDS = 2.0
_OTHER_FOLDER = "Set TUNEBOOK_CACHE to a folder you own"


def cache_root() -> Path:
    """Return the cache folder: TUNEBOOK_CACHE, or ~/.cache/tunebook. Raises `Refused` where `~` is nobody's home."""
    given = os.environ.get("TUNEBOOK_CACHE")
    try:
        return Path(given or "~/.cache/tunebook").expanduser()
    except RuntimeError as error:
        raise Refused(Problem(f"the cache folder has no place: {error}", _OTHER_FOLDER, "TUNEBOOK_CACHE")) from error


def digest_of(parts: Mapping[str, Any]) -> str:
    """Return the sha256 of everything that what is cached depends on; `parts` must be JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """Return a file's sha256, remembered while its place, size and times are the same: 15 GB take half a minute."""
    status = path.stat()
    seen = [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    remembered = cache_root() / "digests" / digest_of({"file": seen})
    with suppress(OSError, ValueError):
        if _SHA256.fullmatch(digest := remembered.read_text(encoding="utf-8")):
            return digest
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if time.time() - max(status.st_mtime, status.st_ctime) > _SETTLED_SECONDS:
        with suppress(OSError):  # a cache that cannot be written costs time alone
            write_whole(remembered, digest)
    return digest


def load_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a prepared folder, or None where the folder is absent or a file of it is damaged.

    The manifest is written last and holds the size and the sha256 of every file and its own, so neither half-written
    folders nor changed bytes are taken for whole.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        own, sizes, digests = manifest.pop("manifest_sha256"), manifest["file_sizes"], manifest["file_sha256"]
        is_whole = (
            own == digest_of(manifest)
            and sizes == {name: (folder / name).stat().st_size for name in sizes}
            and digests == {name: file_sha256(folder / name) for name in sizes}
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return manifest if is_whole else None


def load_or_make(folder: Path, make: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the manifest of `folder`, after `make` filled it if it isn't there yet.

    `make` writes files into the folder it is given and returns what the manifest is to say beside their digests. Of
    several processes one makes it and the others wait, for as long as it takes and without a process group. A process
    that is killed leaves a partial folder that nobody reads and the next one removes. Raises `Refused` where the cache
    can't be written.
    """
    manifest = load_manifest(folder)
    if manifest:
        return manifest
    with _writable(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(folder):
            manifest = load_manifest(folder)
            return manifest or _make_whole(folder, make)


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`, which the system frees when its holder ends in whatever way."""
    lock = FileLock(f"{folder}.lock", poll_interval=_POLL_SECONDS)
    try:
        lock.acquire(timeout=SILENT_SECONDS)
    except Timeout:
        say_waiting()
        lock.acquire()
    except NotImplementedError as error:  # some network disks have no locks
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), str(folder)) from error
    except OSError as error:  # flock's own errors name no file
        raise OSError(error.errno, error.strerror, str(folder)) from error
    try:
        yield
    finally:
        lock.release()


def _make_whole(folder: Path, make: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
    """Fill a partial folder beside `folder` and rename it into place; the caller holds the lock."""
    for left in folder.parent.glob(f"{folder.name}.partial-*"):
        shutil.rmtree(left)
    partial = folder.with_name(f"{folder.name}.partial-{uuid.uuid4().hex}")
    partial.mkdir()
    try:
        facts: dict[str, Any] = json.loads(json.dumps(dict(make(partial))))  # as it will be read
        files = sorted(partial.iterdir())
        facts["file_sizes"] = {file.name: file.stat().st_size for file in files}
        facts["file_sha256"] = {file.name: file_sha256(file) for file in files}
        whole = {**facts, "manifest_sha256": digest_of(facts)}
        (partial / _MANIFEST).write_text(json.dumps(whole), encoding="utf-8")
        _flush_to_disk(partial)
        if folder.exists():  # damaged: a whole one would have been returned before
            shutil.rmtree(folder)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return facts


def _flush_to_disk(folder: Path) -> None:
    """Make the files durable before the rename, which could otherwise survive a power cut that they don't."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Turn a full disk and every error about the cache itself into a refusal; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            message = f"no space left for the prepared data: {error.strerror}"
            raise Refused(Problem(message, MORE_ROOM, where=str(folder))) from error
        if _concerns(error, folder):
            message = f"the cache folder can't be written: {error.strerror}"
            raise Refused(Problem(message, _OTHER_FOLDER, where=str(folder))) from error
        raise


def _concerns(error: OSError, folder: Path) -> bool:
    """Whether the error is about `folder`, something in it or a folder above it."""
    place = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
    return place is not None and (place in (folder, *folder.parents) or folder in place.parents)
