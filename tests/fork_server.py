"""Real ranks of finetune.py and train_ddp.py without ten seconds of importing: forked off a process that has done it.

`python fork_server.py` serves; `ForkServer` is the other end. Each rank is a process of its own that runs the entry as
a launcher would start it, joins a real group, and can be killed.
"""

import atexit
import ctypes
import faulthandler
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parent
CLONE_NEWNET = 0x40000000
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Life:
    """The ranks of one start of a run: their process ids, the exit codes of those that ended, and where they print."""

    pids: list[int]
    log: Path
    began: float
    codes: dict[int, int] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return len(self.codes) == len(self.pids)

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def rank_codes(self) -> list[int]:
        return [self.codes[pid] for pid in self.pids]


class ForkServer:
    """Starts ranks, tells their exit codes; negative ones are signals."""

    def __init__(self) -> None:
        environ = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        environ |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(TESTS / "fork_server.py")],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._lives: list[Life] = []
        self._heard = b""
        assert self._read(120) == "ready"

    def start(self, words: Sequence[str], num_processes: int, folder: Path, log: Path, **environ: str) -> Life:
        """Start finetune.py, or what SCRIPT names, with `words` as each of `num_processes` ranks, in `folder`."""
        script = environ.pop("SCRIPT", "finetune")
        order = {"script": script, "words": list(words), "size": num_processes, "folder": str(folder), "log": str(log)}
        self._process.stdin.write(json.dumps({**order, "environ": environ}).encode() + b"\n")
        self._process.stdin.flush()
        while "pids" not in (news := self._read(60)):
            assert news, "the server is gone"
            self._note(news)
        life = Life(news["pids"], log, time.monotonic())
        self._lives.append(life)
        return life

    def wait(self, life: Life, seconds: float = 120) -> Life:
        """Return when all ranks of a life have ended; they have `seconds`."""
        deadline = time.monotonic() + seconds
        while not life.is_over:
            assert time.monotonic() < deadline, f"ranks {life.pids} run on:\n{life.output()[-4000:]}"
            self.poll(0.2)
        return life

    def poll(self, seconds: float) -> None:
        """Take in what is told within some time."""
        if news := self._read(seconds):
            self._note(news)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()

    def _read(self, seconds: float) -> dict:
        """Return the next line; what a pipe's own buffer holds would be unknown to select."""
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._heard:
            if not select.select([pipe], [], [], seconds)[0] or not (more := os.read(pipe, 65536)):
                return {}
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    def _note(self, news: dict) -> None:
        for life in self._lives:
            if news.get("pid") in life.pids:
                life.codes[news["pid"]] = news["code"]
                life.ended[news["pid"]] = time.monotonic()


@functools.cache
def shared_server() -> ForkServer:
    """Return the one server that the tests of this process share: each costs ten seconds of importing."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def become_rank(order: dict, rank: int, port: int) -> None:
    """Run finetune.py as one rank of a launch and end the process with its code."""
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    numbers = (rank, rank, order["size"], order["size"], "127.0.0.1", port)
    if order["size"] > 1:
        os.environ.update({name: str(number) for name, number in zip(RANK_VARIABLES, numbers, strict=True)})
    os.environ.update(order["environ"])
    if hosts := os.environ.get("HOSTS"):
        enter_host(hosts.split(","), rank)
    os.chdir(order["folder"])
    sys.argv = [f"{order['script']}.py", *order["words"]]
    faulthandler.dump_traceback_later(90)  # a rank that hangs tells where
    code = 0
    try:
        from tunebook.launching.entry import run_rank

        inject_faults()
        run_rank(getattr(importlib.import_module(order["script"]), order["script"]))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def enter_host(hosts: Sequence[str], rank: int) -> None:
    """Move this process into the network namespace that HOSTS names for its rank, as if launched on that machine."""
    namespace = os.open(f"/run/netns/{hosts[rank]}", os.O_RDONLY)
    assert ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    os.close(namespace)
    os.environ["LOCAL_RANK"] = str(hosts[:rank].count(hosts[rank]))
    os.environ["LOCAL_WORLD_SIZE"] = str(hosts.count(hosts[rank]))


def inject_faults() -> None:
    """Make the faults that the environment asks for, by hooks on what the product calls."""
    if fault := os.environ.get("FAULT"):
        import faults

        getattr(faults, fault)()


def serve() -> None:
    """Fork ranks as ordered, a JSON line each, and tell each one's end, until the orders end."""
    sys.path.insert(0, str(TESTS.parent))
    # What finetune.py imports once a recipe is accepted, the lazy parts of transformers and peft with it.
    for module in (
        "finetune",
        "train_ddp",
        "tunebook.data.prepare",
        "tunebook.training.starting",
        "tunebook.training.run",
    ):
        importlib.import_module(module)
    from huggingface_hub import ModelCardData  # noqa: F401
    from peft import LoraConfig, get_peft_model  # noqa: F401
    from PIL import Image, ImageDraw, ImageFont  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM  # noqa: F401

    tell("ready")
    running: set[int] = set()
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], 0.02)
        if ready:
            line = sys.stdin.readline()
            if not line:
                break
            order, port = json.loads(line), free_port()
            pids = []
            for rank in range(order["size"]):
                pid = os.fork()
                if pid == 0:
                    become_rank(order, rank, port)
                pids.append(pid)
            running |= set(pids)
            tell({"pids": pids})
        for pid in sorted(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.discard(pid)
                tell({"pid": pid, "code": os.waitstatus_to_exitcode(status)})
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def tell(news: object) -> None:
    print(json.dumps(news), flush=True)


if __name__ == "__main__":
    serve()
