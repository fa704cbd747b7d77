"""The speed of training and what padding costs, ours beside what people would use instead; one command.

python benchmarks/run_all.py                                             (make bench; more than an hour; quiet machines)
python benchmarks/run_all.py --rounds 1 --steps 2 --results FOLDER       to try it

Two models, LoRA and QLoRA, trained by finetune.py, by train_ddp.py and by others, each as two processes of its own on
the same model, rows, labels, optimizer and precision. First all train three steps on one global batch: the loss of the
first, what is trained, in which types and by which optimizer must be the same, the first gradient's norm and the
adapter's at the end as large. Then they take turns in rounds, and after those finetune.py and train_ddp.py alone. What
counts is trained tokens a second from the end of the first optimizer step to the end of the last; a ratio is the median
of those inside the rounds. Exit code 1 where a promise is not kept; what a trial leaves out is named on the page and is
no failure. Any option needs --results, a folder: the results of the whole benchmark are not overwritten by others.
"""

import argparse
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from arguments import at_least, check_results
from contest import (
    BY_HAND,
    CONTESTANTS,
    LIGHTNING,
    NEEDS,
    NUM_PROCESSES,
    OURS,
    ROOT,
    Contest,
    Run,
    Size,
    launched,
    make_contest,
    run_contestant,
)
from data_speed import SHARED, check_files
from machine import where_and_when
from padding_share import broken_promises, measure
from peers import PEERS, install
from result_files import write_text
from results_table import CONTESTS, LARGER, METHODS, TINY, broken_ratios, ratios_of, render, unmeasured

HERE = Path(__file__).resolve().parent
CHECK_STEPS, SEEN = 3, ("trains", "gradient_norm", "moved", "versions")
# The first loss is that of the base, B being 0. All draw A from one seed; Lightning's loop, as its users write it,
# averages the means of micro-batches, which weighs rows by how few labels are beside them.
FIRST_LOSS_WITHIN, NORMS_WITHIN, AS_MEANS = 1e-5, 1e-3, {LIGHTNING: 0.15}
LIMIT_SECONDS = 900.0


def sizes(given: argparse.Namespace) -> dict[str, Size]:
    """Return the model where compute rules, and the one where overhead does."""
    larger = Size(Path(), given.rows, 64, 8, given.tokenizer)
    tiny = Size(ROOT / "assets" / "tiny-qwen2", ROOT / "data" / "quickstart.jsonl", 32, 4, times_the_steps=10)
    return {LARGER: larger, TINY: tiny}


def install_peers(wanted: list[str]) -> dict[str, str]:
    """Make the environments that are needed; return why contestants are left out."""
    missing = {name: install(name) for name in PEERS if name in {NEEDS.get(one) for one in wanted}}
    return {one: f"not installed: {missing[NEEDS[one]]}" for one in wanted if missing.get(NEEDS.get(one, ""))}


def check_training(contest: Contest, names: list[str]) -> dict[str, dict[str, Any]]:
    """Train all on one global batch, whose first loss no order of rows changes; return what each came to."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        run = run_contestant(name, contest, "check", LIMIT_SECONDS)
        if run.error or not run.losses:
            found[name] = {"error": run.error or "no loss was logged"}
        else:
            found[name] = {"first_loss": run.losses[0][1], **{one: getattr(run, one) for one in SEEN}}
            if apart := differences(found[name], found[OURS], AS_MEANS.get(name, NORMS_WITHIN)):
                found[name]["error"] = f"not the same training: {'; '.join(apart)}"
        print(f"{contest.name}: {name}: {found[name].get('error') or found[name]}", flush=True)
        if name in (OURS, BY_HAND) and "error" in found[name]:
            raise SystemExit(f"{name}: {found[name]['error']}")
    return found


def differences(one: Mapping[str, Any], ours: Mapping[str, Any], norms_within: float) -> list[str]:
    """Return in what the training of a contestant is not ours, its norms by more than `norms_within` of them."""
    apart = [f"{name} {value}, not {ours['trains'][name]}" for name, value in one["trains"].items()
             if value != ours["trains"][name]]  # fmt: skip
    for name, within in (("first_loss", FIRST_LOSS_WITHIN), ("gradient_norm", norms_within), ("moved", norms_within)):
        if not abs(one[name] / ours[name] - 1) <= within:
            apart.append(f"{name} {one[name]:.6g}, not {ours[name]:.6g}")
    return apart


def compete(contest: Contest, names: list[str], rounds: int, pairs: int) -> dict[str, list[Run]]:
    """Let the contestants take turns, every other round backwards; one that fails is told of and drops out.

    Where not even one in twenty parts two of them, a few rounds do not tell which is faster: finetune.py and
    train_ddp.py take turns `pairs` times.
    """
    found: dict[str, list[Run]] = {name: [] for name in names}
    for number in range(max(rounds, pairs)):
        taking_part = names if number < rounds else [one for one in names if one in (OURS, BY_HAND)]
        in_order = taking_part if number % 2 == 0 else taking_part[::-1]
        for name in [one for one in in_order if all(run.error is None for run in found[one])]:
            run = run_contestant(name, contest, f"round{number}", LIMIT_SECONDS)
            found[name].append(run)
            said = run.error or f"{run.tokens_per_second:,.0f} trained tokens/s, {run.whole_seconds:.0f} s in all"
            print(f"{contest.name}: round {number + 1}: {name}: {said}", flush=True)
            if name == OURS and run.error:
                raise SystemExit(f"{OURS}: {run.error}")
    return found


def hold_contest(name: str, size: Size, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return all that one size and method came to."""
    left_out, where = given.left_out, where_and_when()
    names = [one for one in given.contestants if one not in left_out]
    checks = check_training(make_contest(name, size, 1, CHECK_STEPS, folder / f"{name} check"), names)
    contest = make_contest(name, size, given.steps * size.times_the_steps, 1, folder / name)
    runs = compete(contest, [one for one in names if "error" not in checks[one]], given.rounds, given.pairs)
    errors = left_out | {one: checks[one]["error"] for one in names if "error" in checks[one]}
    errors |= {one: run.error for one, all_runs in runs.items() for run in all_runs if run.error}
    finished = {one: all_runs for one, all_runs in runs.items() if one not in errors}
    return {
        "name": name,
        "where": where,
        "load_average_after": os.getloadavg(),
        "steps": given.steps * size.times_the_steps,
        "rounds": given.rounds,
        "pairs": max(given.rounds, given.pairs),
        "model_rows_and_batch": f"{size.rows.name}, global batch {size.global_batch}, micro-batch {size.micro_batch}",
        "ratios": ratios_of(finished, OURS),
        "errors": errors,
        "checks": checks,
        "commands": {one: shlex.join(launched(CONTESTANTS[one](contest, Path("OUT")), Path("OUT"))) for one in runs},
        "runs": {one: [told(run) for run in all_runs] for one, all_runs in runs.items()},
    }


def told(run: Run) -> dict[str, Any]:
    """Return a run as JSON, without what the check told of its contestant already."""
    return {name: value for name, value in asdict(run).items() if name not in SEEN}


def run_everything(given: argparse.Namespace) -> dict[str, Any]:
    """Install, measure padding, hold every contest; return the results."""
    given.left_out = install_peers(given.contestants)
    for name, why in given.left_out.items():
        print(f"{name}: {why}", flush=True)
    found: dict[str, Any] = {
        **where_and_when(),
        "settings": {"processes": NUM_PROCESSES, "threads": 1},
        "padding": measure(given.rows, given.tokenizer),
        "contests": {},
    }
    earlier = (given.results / found["date"]).with_suffix(".json")
    if earlier.exists():
        held = json.loads(earlier.read_text(encoding="utf-8"))["contests"]
        found["contests"] |= {name: one for name, one in held.items() if goes_with(one, found, given.contests)}
    with TemporaryDirectory() as folder:
        for label, size in sizes(given).items():
            for method in METHODS:
                name = f"{label}, {method}"
                if name in given.contests:
                    found["contests"][name] = hold_contest(name, size, given, Path(folder))
                    write_results(found, given.results)
    return found


def goes_with(contest: Mapping[str, Any], found: Mapping[str, Any], held_now: Sequence[str]) -> bool:
    """Return whether a contest of the same day, held alone, is of the same code and not held again."""
    where = contest.get("where", {})
    same = all(where.get(name) == found[name] for name in ("commit", "versions"))
    name_now = contest.get("name") in held_now
    return same and not name_now and not (where["uncommitted_changes"] or found["uncommitted_changes"])


def write_results(found: dict[str, Any], folder: Path) -> str:
    """Write <date>.json and <date>.md, after each contest again, and return the page."""
    found["broken_promises"] = broken_promises(found["padding"]) + broken_ratios(found["contests"])
    found["not_measured"] = unmeasured(found["contests"])
    text, stem = without_places(render(found)), folder / found["date"]
    write_text(stem.with_suffix(".json"), without_places(json.dumps(found, indent=1)) + "\n")
    write_text(stem.with_suffix(".md"), text)
    return text


def without_places(text: str) -> str:
    """Return a text without where this machine keeps its files: paths below this project, its parent and /tmp."""
    for place, name in ((sys.executable, "python"), (f"{ROOT}/", ""), (f"{ROOT.parent}/", "../")):
        text = text.replace(place, name)
    return re.sub(rf"{re.escape(gettempdir())}/[^/'\" ]+", "FOLDER", text)


def read_arguments() -> argparse.Namespace:
    """Return the command line; the files that are needed are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=SHARED / "data" / "alpaca_2000.json", help="a JSON list of rows")
    parser.add_argument("--tokenizer", type=Path, default=SHARED / "assets" / "qwen2.5-tokenizer-mini")
    for name, default, least, said in (
        ("--rounds", 5, 1, "by turns, of all"),
        ("--pairs", 10, 1, "rounds of finetune.py and train_ddp.py, which are closest"),
        ("--steps", 4, 2, "of a run; ten times as many of the tiny model"),
    ):
        parser.add_argument(name, type=at_least(least), default=default, metavar="N", help=said)
    parser.add_argument("--results", type=Path, help="the folder of the results; benchmarks/results with nothing else")
    parser.add_argument(
        "--contests",
        nargs="+",
        choices=CONTESTS,
        default=list(CONTESTS),
        help="others held on the same day by the same code stay in the results",
    )
    parser.add_argument("--contestants", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    given = parser.parse_args()
    keep_apart(parser, given)
    if OURS not in given.contestants:
        parser.error(f"all are measured against {OURS}, which is not among them")
    check_files(parser, given)
    today = date.today().isoformat()
    check_results(parser, "--results", given.results, (f"{today}.json", f"{today}.md"))
    return given


def keep_apart(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Put the results where those of the whole benchmark are if this is one, else refuse to without --results."""
    given.contestants = [one for one in CONTESTANTS if one in given.contestants]
    given.contests = [one for one in CONTESTS if one in given.contests]
    others = [f"--{name}" for name, value in vars(given).items() if value != parser.get_default(name)]
    if given.results is None and others:
        parser.error(f"{', '.join(others)}: not the whole benchmark, whose results stay; give --results FOLDER")
    given.results = given.results or HERE / "results"


def main() -> None:
    """Run everything; exit code 1 where a promise is not kept."""
    given = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # the contestants end with it
    found = run_everything(given)
    print(write_results(found, given.results))
    sys.exit("; ".join(found["broken_promises"]) or 0)


if __name__ == "__main__":
    main()
