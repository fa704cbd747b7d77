"""A refusal is said once, however many processes there are, and each of them ends with exit code 2."""

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tunebook.errors import EXIT_REFUSED, Refused

# How far apart the ranks of one machine may come here. Only a rank that refuses alone waits that long.
PATIENCE_SECONDS = 10.0
POLL_SECONDS = 0.01

# torch's names first; then those of mpirun and srun, whose tasks are refused where torch's are missing.
RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
LOCAL_RANK_NAMES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
NUM_LOCAL_NAMES = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "WORLD_SIZE",
)


def exit_refused(refused: Refused, environ: Mapping[str, str] = os.environ) -> NoReturn:
    """Print the report to stderr once for all ranks, wait until each has come, and exit with code 2.

    torchrun and accelerate end the other ranks 0.1 s after the first has left, so the ranks of one machine meet in a
    private folder, named after the launcher they share: local rank 0 prints and tells what it printed, the others wait
    for that and add only problems of their own, as `rank N: ...`. A rank whose local rank 0 does not come prints its
    own report. Machines cannot see each other here: each says it once, and all but rank 0's name rank and host.
    After a restart (`--max-restarts`) what was said before is not said again.

    Works before any process group exists and without torch. Raises SystemExit(2), in every case.
    """
    launched = _read_launched(environ)
    if launched.num_local > 1:
        with suppress(KeyboardInterrupt):
            _refuse_among_ranks(refused, launched)
    else:
        _report(refused, launched)
    sys.exit(EXIT_REFUSED)


@dataclass(frozen=True)
class _Launched:
    """What the launcher's environment tells, read without trust: it may be what is refused.

    `memory` is a folder of the launcher's that outlives a restart, None where it restarts nothing.
    """

    rank: int
    local_rank: int
    num_local: int
    is_first_machine: bool
    is_restart: bool
    meeting_place: Path
    memory: Path | None

    def label(self, text: str) -> str:
        """Return `text` with rank and host before it, unless rank 0 says it."""
        if self.rank == 0:
            return text
        return f"rank {self.rank}{'' if self.is_first_machine else ' on ' + socket.gethostname()}: {text}"


def _read_launched(environ: Mapping[str, str]) -> _Launched:
    launcher = os.getppid()
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    key = [str(os.getuid()), str(launcher), _start_time(launcher), *(environ.get(name, "") for name in names)]
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:16]
    local_rank = _number(environ, LOCAL_RANK_NAMES)
    return _Launched(
        rank=_number(environ, RANK_NAMES) or 0,
        local_rank=local_rank or 0,
        num_local=1 if local_rank is None else _number(environ, NUM_LOCAL_NAMES) or 1,
        is_first_machine=not _number(environ, ("GROUP_RANK", "SLURM_NODEID")),
        is_restart=bool(_number(environ, ("TORCHELASTIC_RESTART_COUNT",))),
        meeting_place=Path(tempfile.gettempdir()) / f"tunebook-refusal-{digest}",
        memory=_memory(environ) if _number(environ, ("TORCHELASTIC_MAX_RESTARTS",)) else None,
    )


def _number(environ: Mapping[str, str], names: Sequence[str]) -> int | None:
    """Return the number that starts the first of these variables that has one (Slurm writes `2(x3)`), else None."""
    for name in names:
        digits = re.match(r"\d+", environ.get(name, ""))
        if digits:
            return int(digits.group())
    return None


def _memory(environ: Mapping[str, str]) -> Path | None:
    """Return the folder that torch's agent keeps for all attempts: <folder>/attempt_<n>/<local rank>/error.json."""
    parents = Path(environ.get("TORCHELASTIC_ERROR_FILE", "")).parents
    return parents[2] if len(parents) > 3 and parents[2].is_dir() else None


def _refuse_among_ranks(refused: Refused, launched: _Launched) -> None:
    """Say it once among the ranks of this machine, and return when all have come or patience ends."""
    with suppress(ValueError):  # not the main thread
        # The launcher's TERM after the first exit would turn this rank's 2 into -15.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    place = launched.meeting_place
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        if place.stat().st_uid != os.getuid() or place.is_symlink():
            raise PermissionError(f"{place} belongs to somebody else")
        arrived = place / f"arrived-{launched.local_rank}"
        arrived.touch()
    except OSError:  # nowhere to meet: better said by each than by none
        _report(refused, launched)
        return
    try:
        if launched.local_rank == 0:
            _lead(refused, launched)
        else:
            _follow(refused, launched)
    finally:
        arrived.unlink(missing_ok=True)
        if not any(place.glob("arrived-*")):
            shutil.rmtree(place, ignore_errors=True)


def _lead(refused: Refused, launched: _Launched) -> None:
    place = launched.meeting_place
    _report(refused, launched)
    draft = place / "draft"
    draft.write_text(json.dumps(_lines(refused)), encoding="utf-8")
    draft.rename(place / "said")
    _wait_until(lambda: len(list(place.glob("arrived-*"))) >= launched.num_local)
    (place / "leave").touch()


def _follow(refused: Refused, launched: _Launched) -> None:
    said_file, leave_file = launched.meeting_place / "said", launched.meeting_place / "leave"
    led = _wait_until(said_file.exists)
    said = set(json.loads(said_file.read_text(encoding="utf-8"))) if led else set()
    for line in _lines(refused):
        if line not in said and _is_first_to_say(line, launched.meeting_place) and _is_news(line, launched):
            _print(launched.label(f"refused: {line}"))
    if led:
        _wait_until(leave_file.exists)


def _report(refused: Refused, launched: _Launched) -> None:
    """Print the whole report, unless all of it was said before a restart."""
    news = [line for line in _lines(refused) if _is_news(line, launched)]
    if news:
        _print(launched.label(refused.render()))


def _lines(refused: Refused) -> list[str]:
    return [problem.render() for problem in refused.problems]


def _is_news(line: str, launched: _Launched) -> bool:
    """Whether the line was not said before a restart; without a memory a restart has nothing new to say."""
    if launched.memory is None:
        return not launched.is_restart
    return _is_first_to_say(line, launched.memory)


def _is_first_to_say(line: str, place: Path) -> bool:
    """Whether no other process has said the line at this place; it counts as said from now on."""
    try:
        (place / f"tunebook-said-{hashlib.sha256(line.encode()).hexdigest()[:16]}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # better said twice than never
        return True
    return True


def _wait_until(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _start_time(process_id: int) -> str:
    """Return when a process started, in clock ticks since boot, so that a reused id is another launcher."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _print(text: str) -> None:
    """Write one report to stderr in one piece; a reader that is gone is no reason for a traceback."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is sys.stderr:
                stream.write(text + "\n")
            stream.flush()
        except (OSError, ValueError, AttributeError):
            _drop(stream)


def _drop(stream: object) -> None:
    """Point a broken stream at nothing, so that the interpreter's last flush does not complain and change the code."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # type: ignore[attr-defined]
