"""What a second process is worth: trained tokens a second of finetune.py on one and on two, by turns.

python benchmarks/process_scaling.py        (make bench-scaling; quiet machines of at least two cores)

The contests of run_all.py, whose global batch stays the same: two processes take half of the micro-steps each. Every
process has one thread. A speed-up is the median of those inside the rounds.
"""

import argparse
import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from arguments import at_least, check_results
from contest import OURS, Contest, make_contest, run_contestant
from data_speed import SHARED, check_files
from machine import where_and_when
from result_files import write_json
from results_table import LARGER, TINY
from run_all import LIMIT_SECONDS, sizes

HERE = Path(__file__).resolve().parent
PROCESSES = (1, 2)


def measure(contest: Contest, rounds: int) -> dict[str, Any]:
    """Return the speeds of one contest by number of processes, and what the second is worth."""
    speeds: dict[int, list[float]] = {number: [] for number in PROCESSES}
    for turn in range(rounds):
        for number in PROCESSES if turn % 2 == 0 else PROCESSES[::-1]:
            run = run_contestant(OURS, contest, f"round{turn}-{number}", LIMIT_SECONDS, number)
            if run.error:
                raise SystemExit(f"{contest.name} on {number}: {run.error}")
            speeds[number].append(run.tokens_per_second)
        print(contest.name, {number: round(found[-1]) for number, found in speeds.items()}, flush=True)
    gains = [two / one for one, two in zip(*speeds.values(), strict=True)]
    return {
        "tokens_per_second": {number: round(statistics.median(found)) for number, found in speeds.items()},
        "speed_up": round(statistics.median(gains), 2),
        "least_to_most": [round(min(gains), 2), round(max(gains), 2)],
    }


def main() -> None:
    """Measure both models with LoRA and write benchmarks/results/process_scaling.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=SHARED / "data" / "alpaca_2000.json", help="a JSON list of rows")
    parser.add_argument("--tokenizer", type=Path, default=SHARED / "assets" / "qwen2.5-tokenizer-mini")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--steps", type=at_least(2), default=6, help="of a run; ten times as many of the tiny model")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "process_scaling.json")
    given = parser.parse_args()
    check_files(parser, given)
    check_results(parser, "--results", given.results)
    found = where_and_when()
    with TemporaryDirectory() as folder:
        for label in (LARGER, TINY):
            size = sizes(given)[label]
            contest = make_contest(
                f"{label}, LoRA", size, given.steps * size.times_the_steps, 1, Path(folder) / f"{label}, LoRA"
            )
            found[label] = measure(contest, given.rounds)
    write_json(given.results, found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
