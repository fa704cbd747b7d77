"""`tunebook launch`: start the ranks with torch's elastic agent, and end with their own exit code."""

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tunebook.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, Problem, Refused
from tunebook.launching.command import LAUNCHED_BY_TUNEBOOK

SCRIPT_NAME = "finetune.py"

# How long the ranks may take to save a checkpoint after a signal; torch's 30 s can be shorter than one step.
SHUTDOWN_SECONDS = 300

# Those torchrun forwards to the ranks, and the two that Slurm is often told to send before time is up.
FORWARDED_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"


def find_script(name: str = SCRIPT_NAME) -> Path:
    """Return a script of the current folder, else of the checkout this package runs from; Refused without one."""
    import tunebook

    places = [Path(), Path(tunebook.__file__).parents[2]]
    for place in places:
        if (place / name).is_file():
            return place / name
    folders = " and ".join(str(place.resolve()) for place in places)
    raise Refused(Problem(f"no {name} in {folders}", "Change to a clone of tunebook first", where="tunebook launch"))


def launch(script: Path, arguments: Sequence[str], num_processes: int) -> int:
    """Run `script` on `num_processes` processes of this machine and return the exit code they ended with.

    Raises Refused for a missing script or fewer than one process.
    """
    if num_processes >= 1 and not script.is_file():
        raise Refused(Problem("no such file", "Name the script to run", where=str(script)))
    return launch_words((str(script), *arguments), num_processes)


def launch_words(words: Sequence[str], num_processes: int) -> int:
    """Run python with `words` on `num_processes` processes of this machine and return the exit code they ended with.

    The ranks inherit stdin, stdout and stderr as they are. Nothing of torch's agent is printed. The code is that of
    the rank that failed first, not of those that were then ended; 1 for a rank killed by a signal, which is named on
    stderr. SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 are forwarded once to each rank, which has
    `SHUTDOWN_SECONDS` (or TORCH_ELASTIC_SHUTDOWN_TIMEOUT) to end; the code is then theirs, or 128 + signal where they
    had none. No rank outlives this call. A single process sees one GPU, the first of the visible ones.

    Several processes get OMP_NUM_THREADS=1 unless it is set, as under torchrun. Raises Refused for fewer than one
    process.
    """
    if num_processes < 1:
        raise Refused(Problem(f"at least 1 process runs, got {num_processes}", where="--num-processes"))
    try:
        with _launcher_environment(num_processes), _signal_handlers_restored(), _quiet_agent():
            return _run_agent(words, num_processes)
    except KeyboardInterrupt:  # before the agent has taken the signals over
        return 128 + signal.SIGINT


def _run_agent(words: Sequence[str], num_processes: int) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException

    agent, rendezvous = _build_agent(words, num_processes)
    try:
        result = agent.run()
        return _code_of_first_failure(result.failures) if result.is_failed() else EXIT_DONE
    except SignalException as interruption:
        return _code_after_signal(_exit_codes(agent), interruption.sigval)
    finally:
        for number in _forwarded_signals():
            signal.signal(number, signal.SIG_IGN)
        _kill_leftover(agent)
        rendezvous.shutdown()


def _build_agent(words: Sequence[str], num_processes: int) -> tuple[Any, Any]:
    """Return the agent for one machine, on a free port, and its rendezvous."""
    import torch.distributed.elastic.rendezvous.registry as rendezvous_registry
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    rendezvous = rendezvous_registry.get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint="localhost:0",
            run_id=str(uuid.uuid4()),
            min_nodes=1,
            max_nodes=1,
            local_addr="localhost",
        )
    )
    spec = WorkerSpec(
        role="default",
        local_world_size=num_processes,
        entrypoint=sys.executable,
        args=("-u", *(word.replace("$", "$$") for word in words)),  # the agent fills in ${local_rank}
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="localhost",
        virtual_local_rank=num_processes == 1,
    )
    patience = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_SECONDS))
    agent = LocalElasticAgent(spec, logs_specs=DefaultLogsSpecs(log_dir=os.devnull), shutdown_timeout=patience)
    return agent, rendezvous


def _code_of_first_failure(failures: dict[int, Any]) -> int:
    """Return the code of the rank that failed first.

    The agent notes failures in the order it saw them, and those it ended itself come last (their time stamps are whole
    seconds and do not tell). A TERM noted first may still be the agent's own, sent just before it looked.
    """
    codes = {rank: int(failure.exitcode) for rank, failure in failures.items()}
    for rank, code in codes.items():
        if code < 0 and -code != signal.SIGTERM:
            print(
                f"tunebook launch: rank {rank} was ended by signal {-code} ({signal.strsignal(-code)})", file=sys.stderr
            )
    # 75 is also how a rank that still loads answers the agent's TERM.
    own = [code for code in codes.values() if code not in (-signal.SIGTERM, EXIT_INTERRUPTED)]
    first = own[0] if own else EXIT_INTERRUPTED if EXIT_INTERRUPTED in codes.values() else EXIT_FAILED
    return first if first > 0 else EXIT_FAILED


def _code_after_signal(codes: Sequence[int], received: signal.Signals) -> int:
    """Return the ranks' code after a forwarded signal: a failure before an interruption (75), and that before 0."""
    failed = [code for code in codes if code > 0]
    if failed:
        return min(failed)
    return EXIT_DONE if codes and not any(codes) else 128 + received


def _exit_codes(agent: Any) -> list[int]:
    """Return the exit codes of the ranks that have ended."""
    handlers = agent._pcontext.subprocess_handlers.values() if agent._pcontext is not None else ()
    ended = (handler.proc.poll() for handler in handlers)
    return [code for code in ended if code is not None]


def _kill_leftover(agent: Any) -> None:
    """Kill what still runs, which takes a third signal while the agent waits, and end the agent's reading threads."""
    if agent._pcontext is not None:
        agent._pcontext.close(signal.SIGKILL, timeout=5)


@contextmanager
def _launcher_environment(num_processes: int) -> Iterator[None]:
    """Set what the ranks inherit, and nothing beyond the launch."""
    wanted = {LAUNCHED_BY_TUNEBOOK: "1", "TORCHELASTIC_SIGNALS_TO_HANDLE": FORWARDED_SIGNALS}
    if num_processes > 1 and "OMP_NUM_THREADS" not in os.environ:
        wanted["OMP_NUM_THREADS"] = "1"
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _signal_handlers_restored() -> Iterator[None]:
    """Give back the handlers that the agent replaces for good."""
    before = {number: signal.getsignal(number) for number in _forwarded_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _forwarded_signals() -> list[signal.Signals]:
    return [signal.Signals[name] for name in FORWARDED_SIGNALS.split(",")]


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Keep the agent's log off the terminal: it repeats what the ranks have said, and their code is returned."""
    logger = logging.getLogger("torch.distributed.elastic")
    propagated, silent = logger.propagate, logging.NullHandler()
    logger.addHandler(silent)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagated
        logger.removeHandler(silent)
