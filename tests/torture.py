"""Kill runs at random instants until they are done, and compare what they leave with the run that nobody killed.

`python torture.py --kills 100 --seed 0` prints a table: kills, lives, where they struck, what was lost. SIGKILL goes to
one rank or to all, in real processes that run finetune.py; a run ends on its own number of processes or on others.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from broken_off import adapter_of, largest_difference, losses_of, make_place, steps_saved
from fork_server import ForkServer, Life

# The one rank that is left has this long to notice that the other is gone, and to end by itself.
SECONDS_TO_END = 30
WORDS = ("training.save_steps=1", "training.save_total_limit=3", "data.answer_rows=1")
# How long the ranks of a life are let run after they say that they load: loading takes about 1.5 of these seconds.
LONGEST_LIFE = {1: 2.6, 2: 4.5}


@dataclass
class Tally:
    """What a session of killing did, and whether anything was lost."""

    kills: int = 0
    lives: int = 0
    runs: int = 0
    struck: Counter = field(default_factory=Counter)
    steps_repeated: int = 0
    slowest_end: float = 0.0
    same_count: list[float] = field(default_factory=list)
    other_count: list[float] = field(default_factory=list)
    losses_differ: int = 0
    left_running: int = 0


class Torture:
    def __init__(self, folder: Path, seed: int) -> None:
        self.place = make_place(folder)
        self.draw = random.Random(seed)
        self.server = ForkServer()
        self.tally = Tally()
        self.unbroken = {size: self._unbroken(size) for size in (1, 2)}

    def start(self, name: str, size: int) -> Life:
        log = self.place / f"{name}.{self.tally.lives}.log"
        words = ["recipe.yaml", "--run-dir", name, *WORDS]
        return self.server.start(words, size, self.place, log, TUNEBOOK_CACHE=str(self.place / "cache"))

    def _unbroken(self, size: int) -> Path:
        life = self.server.wait(self.start(f"unbroken-{size}", size))
        assert life.rank_codes() == [0] * size, life.output()
        return self.place / f"unbroken-{size}"

    def run_until_done(self, most_kills: int) -> None:
        """Kill one run again and again, at most so often, then let it end, and compare."""
        number = self.tally.runs
        self.tally.runs += 1
        name, sizes = f"run-{number}", ((1, 1), (2, 2), (2, 1), (1, 2))[number % 4]
        killed = 0
        while killed < most_kills:
            life = self.start(name, sizes[0])
            self.tally.lives += 1
            if not self._kill(life, self.place / name):
                break  # it was faster
            killed += 1
        self.tally.lives += 1
        last = self.server.wait(self.start(name, sizes[1]))
        assert last.rank_codes() == [0] * sizes[1], last.output()
        self._compare(self.place / name, sizes)

    def _kill(self, life: Life, run_dir: Path) -> bool:
        """SIGKILL one rank, or all, at a random instant; return whether any still ran then."""
        deadline = time.monotonic() + self.draw.uniform(0.3, LONGEST_LIFE[len(life.pids)])
        # Half of the kills wait for a checkpoint that is being written, which is a matter of milliseconds.
        in_saving = self.draw.random() < 0.5
        while not life.is_over and (time.monotonic() < deadline or in_saving):
            self.server.poll(0.0005)
            if in_saving and any((run_dir / "checkpoints").glob(".*.writing")):
                time.sleep(self.draw.uniform(0, 0.01))
                break
        if life.codes:
            self.server.wait(life)
            return False
        where = describe(run_dir, life)
        victims = life.pids if self.draw.random() < 0.5 else [self.draw.choice(life.pids)]
        before = steps_saved(run_dir)
        for pid in victims:
            send(pid, signal.SIGKILL)
        struck = time.monotonic()
        self._end_as_a_launcher_does(life)
        codes = [life.codes[pid] for pid in victims]
        if codes != [-signal.SIGKILL] * len(victims):
            return False  # it ended in that instant
        self.tally.kills += 1
        self.tally.struck[where] += 1
        self.tally.slowest_end = max(self.tally.slowest_end, max(life.ended.values()) - struck)
        self.tally.steps_repeated += max(step_reached(life) - max([0, *before, *steps_saved(run_dir)]), 0)
        self.tally.left_running += sum(is_running(pid) for pid in life.pids)
        return True

    def _end_as_a_launcher_does(self, life: Life) -> None:
        """Send SIGTERM to the ranks that are left once one has ended, as torch's agent does, and wait for them."""
        while not life.codes:
            self.server.poll(0.1)
        self.server.poll(0.1)
        for pid in life.pids:
            if pid not in life.codes:
                send(pid, signal.SIGTERM)
        self.server.wait(life, SECONDS_TO_END)

    def _compare(self, run_dir: Path, sizes: tuple[int, int]) -> None:
        unbroken = self.unbroken[sizes[1]]
        difference = largest_difference(adapter_of(run_dir), adapter_of(unbroken))
        if sizes[0] == sizes[1]:
            self.tally.same_count.append(difference)
            self.tally.losses_differ += losses_of(run_dir) != losses_of(unbroken)
        else:
            self.tally.other_count.append(difference)

    def close(self) -> None:
        self.server.close()


def describe(run_dir: Path, life: Life) -> str:
    """Say what a life is doing, by what it has printed and is writing."""
    output = life.output()
    if any((run_dir / "checkpoints").glob(".*.writing")):
        return "while saving"
    if "held out" in output.partition("before training")[2] or any(run_dir.glob(".adapter*")):
        return "while ending"
    if "step " in output.rpartition("loading")[2].partition("plan:")[2].partition("data: ")[2]:
        return "while training"
    return "while loading"


def step_reached(life: Life) -> int:
    """Return the last step that a life has printed."""
    steps = [line.split()[1].partition("/")[0] for line in life.output().splitlines() if line.startswith("step ")]
    return int(steps[-1]) if steps else 0


def send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, number)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def torture(folder: Path, kills: int, seed: int, most_kills_of_a_run: int = 6) -> Tally:
    """Kill runs until there were so many kills; return the tally, after checking that nothing was lost."""
    session = Torture(folder, seed)
    try:
        while session.tally.kills < kills:
            session.run_until_done(min(most_kills_of_a_run, kills - session.tally.kills))
            print(f"{session.tally.kills} kills, {session.tally.runs} runs", file=sys.stderr, flush=True)
    finally:
        session.close()
    return session.tally


def render(tally: Tally) -> str:
    """Return the tally as a table."""
    lines = {
        "kills": tally.kills,
        **{f"  {where}": number for where, number in sorted(tally.struck.items())},
        "runs (each to its end)": tally.runs,
        "lives": tally.lives,
        "slowest end of the ranks left, seconds": f"{tally.slowest_end:.1f}",
        "processes left running": tally.left_running,
        "steps done again": tally.steps_repeated,
        "runs ended on the same processes": len(tally.same_count),
        "  largest difference of their adapters": max(tally.same_count, default=0.0),
        "  whose logged losses differ": tally.losses_differ,
        "runs ended on other processes": len(tally.other_count),
        "  largest difference of their adapters ": max(tally.other_count, default=0.0),
    }
    return "\n".join(f"{name:<42}{value}" for name, value in lines.items())


def check(tally: Tally) -> None:
    """Raise AssertionError where anything was lost."""
    assert max(tally.same_count, default=0.0) == 0 and tally.losses_differ == 0
    assert max(tally.other_count, default=0.0) < 1e-6
    assert tally.left_running == 0 and tally.slowest_end < SECONDS_TO_END


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        tally = torture(Path(folder), given.kills, given.seed)
    print(render(tally))
    print(f"{'seconds':<42}{time.monotonic() - began:.0f}")
    check(tally)


if __name__ == "__main__":
    main()
