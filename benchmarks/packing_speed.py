"""What `data.packing` saves: the same steps padded and packed, each by finetune.py in a process of its own.

python benchmarks/packing_speed.py        (make bench-packing)

run_all.py's larger model with sdpa, LoRA on all linear layers, on rows of the data set as they come; one thread. Both
ways take turns in rounds, every other one packed first; what counts is the median of the ratios inside them. As in
run_all.py a speed is that from the end of the first optimizer step to the end of the last: the first has what only a
first call costs.
"""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from arguments import at_least, check_results
from contest import OURS, Contest, Size, make_contest, run_contestant
from data_speed import SHARED, check_files
from machine import where_and_when
from result_files import write_json
from run_all import LIMIT_SECONDS

HERE = Path(__file__).resolve().parent
GLOBAL_BATCH, MICRO_BATCHES = 32, (4, 16)
DIVISORS = [number for number in range(1, GLOBAL_BATCH + 1) if GLOBAL_BATCH % number == 0]
LEAST_TIMED = 2  # steps, after the first


def run(contest: Contest, label: str, micro_batch: int, packing: bool) -> dict[str, float]:
    """Train to the end and return speed, padding, loss and memory."""
    words = (f"training.per_device_train_batch_size={micro_batch}", f"data.packing={str(packing).lower()}")
    ended = run_contestant(OURS, replace(contest, words=words), label, LIMIT_SECONDS, num_processes=1)
    if ended.error:
        raise SystemExit(f"{' '.join(words)}: {ended.error}")
    [written] = contest.folder.glob(f"{label}-*/run_summary.json")
    summary = json.loads(written.read_text(encoding="utf-8"))
    return {
        "trained_tokens_per_second": round(ended.tokens_per_second, 1),
        "padding": round(summary["padded_tokens"] / summary["processed_tokens"], 4),
        "final_loss": summary["final_loss"],
        "peak_memory_mib": round(summary["peak_memory_bytes"] / 2**20),
    }


def compare(contest: Contest, micro_batch: int, rounds: int) -> dict[str, Any]:
    """Return the medians of both ways by turns, and how many times faster packed rows were in the same round."""
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for number in range(rounds):
        for packing in (False, True) if number % 2 == 0 else (True, False):
            found[packing].append(run(contest, f"{micro_batch}-{number}-{packing}", micro_batch, packing))
    padded, packed = ([one["trained_tokens_per_second"] for one in found[way]] for way in (False, True))
    ratios = [ours / theirs for ours, theirs in zip(packed, padded, strict=True)]
    return {
        "times_padded": round(statistics.median(ratios), 2),
        "least_to_most": [round(min(ratios), 2), round(max(ratios), 2)],
        "padded": medians(found[False]),
        "packed": medians(found[True]),
    }


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each number over the runs."""
    return {name: statistics.median(one[name] for one in runs) for name in runs[0]}


def read_arguments() -> argparse.Namespace:
    """Return the command line, and the `steps` that the rows make; exit code 2 where too few would be timed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=SHARED / "data" / "alpaca_2000.json", help="a JSON list of rows")
    parser.add_argument("--tokenizer", type=Path, default=SHARED / "assets" / "qwen2.5-tokenizer-mini")
    parser.add_argument("--num-rows", type=at_least(1), default=(1 + LEAST_TIMED) * GLOBAL_BATCH)
    parser.add_argument(
        "--micro-batches", type=int, nargs="+", choices=DIVISORS, default=list(MICRO_BATCHES), help="each both ways"
    )
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "packing_speed.json")
    given = parser.parse_args()
    check_files(parser, given)
    given.steps, ragged = divmod(given.num_rows, GLOBAL_BATCH)
    if ragged or given.steps <= LEAST_TIMED:
        least = f"{(1 + LEAST_TIMED) * GLOBAL_BATCH} on: the first step is not timed, and {LEAST_TIMED} are to be"
        parser.error(f"--num-rows {given.num_rows} is no multiple of {GLOBAL_BATCH}, the global batch, from {least}")
    check_results(parser, "--results", given.results)
    return given


def main() -> None:
    """Measure each micro-batch both ways and write the result."""
    given, found = read_arguments(), where_and_when()
    what = f"{given.num_rows} rows, global batch {GLOBAL_BATCH}, {given.steps - 1} steps after the first, one thread"
    found |= {"what": what, "rounds": given.rounds}
    with TemporaryDirectory() as folder:
        size = Size(Path(), given.rows, GLOBAL_BATCH, given.micro_batches[0], given.tokenizer)
        contest = make_contest("packing, LoRA", size, given.steps, 1, Path(folder) / "contest")
        for micro_batch in dict.fromkeys(given.micro_batches):
            found[f"micro-batch {micro_batch}"] = compare(contest, micro_batch, given.rounds)
            print(f"micro-batch {micro_batch}: {json.dumps(found[f'micro-batch {micro_batch}'])}", flush=True)
    write_json(given.results, found)


if __name__ == "__main__":
    main()
