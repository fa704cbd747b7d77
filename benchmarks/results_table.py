"""The ratios of a contest, what is promised of them, and all results as a page of Markdown."""

import statistics
from collections.abc import Mapping, Sequence
from math import comb
from typing import Any

from contest import BY_HAND, CONTESTANTS, OURS, TRL, TRL_REBALANCED, Run
from peers import NOT_TO_BE_HAD

# finetune.py's trained tokens a second by the other's, at least: in every contest, and in those of the larger model.
EVERYWHERE = {BY_HAND: 0.97}
AT_THE_LARGER_SIZE = {TRL: 2.5, TRL_REBALANCED: 1.5}
OF_ANY_OTHER = 1.0
LARGER, TINY = "larger", "tiny"
METHODS = ("LoRA", "QLoRA")
CONTESTS = tuple(f"{size}, {method}" for size in (LARGER, TINY) for method in METHODS)


def ratios_of(runs: Mapping[str, Sequence[Run]], ours: str) -> dict[str, dict[str, Any]]:
    """Return by contestant how many times faster `ours` was: median, least and most of the ratios inside the rounds.

    A contestant may have fewer rounds than `ours`, which are then the first of them.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, theirs in runs.items():
        speeds = [run.tokens_per_second for run in theirs]
        found[name] = {"tokens_per_second": _spread(speeds, 1)}
        if name != ours:
            pairs = zip(runs[ours][: len(theirs)], theirs, strict=True)
            ratios = [mine.tokens_per_second / other.tokens_per_second for mine, other in pairs]
            found[name]["ratio"] = _spread(ratios, 3)
            if interval := median_interval(ratios):
                found[name]["ratio"]["median_within"] = [round(one, 3) for one in interval]
    return found


def median_interval(values: Sequence[float], certainty: float = 0.95) -> tuple[float, float] | None:
    """Return the narrowest two of the values that hold the true median with that certainty; None for fewer than 6.

    It lies below the k-th smallest of n values where fewer than k fall below it, which is a toss of n coins: no
    distribution is assumed (Conover, Practical Nonparametric Statistics, 3.2).
    """
    ordered, number = sorted(values), len(values)
    below = 0.0  # the chance that fewer than k values fall below the median
    kept = None
    for k in range(number // 2):
        below += comb(number, k) / 2**number
        if 1 - 2 * below < certainty:
            break
        kept = ordered[k], ordered[-1 - k]
    return kept


def _spread(values: Sequence[float], digits: int) -> dict[str, float]:
    middle, least, most = statistics.median(values), min(values), max(values)
    return {"median": round(middle, digits), "least": round(least, digits), "most": round(most, digits)}


def promised(contest: str, name: str) -> float:
    """Return the least ratio that is promised of finetune.py against a contestant."""
    at_size = AT_THE_LARGER_SIZE if contest.startswith(LARGER) else {}
    return EVERYWHERE.get(name, at_size.get(name, OF_ANY_OTHER))


def broken_ratios(contests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return each promise that a ratio does not keep, and each contestant that was to be there and is not."""
    broken = []
    for contest, found in contests.items():
        for name, one in found["ratios"].items():
            if "ratio" in one and one["ratio"]["median"] < promised(contest, name):
                ratio, least = one["ratio"]["median"], promised(contest, name)
                broken.append(f"{contest}: {ratio:.2f} times {name}, promised {least:g}")
        broken += [f"{contest}: {name}: {error}" for name, error in found["errors"].items()]
    return broken


def unmeasured(contests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the contests that were not held, and of the others whom finetune.py was not held against.

    Those that failed are not among them: they have broken a promise.
    """
    found = []
    for contest in CONTESTS:
        if contest not in contests:
            found.append(contest)
            continue
        told = {OURS, *contests[contest]["errors"]}
        told |= {name for name, one in contests[contest]["ratios"].items() if "ratio" in one}
        if left_out := [name for name in CONTESTANTS if name not in told]:
            found.append(f"{contest}: {'; '.join(left_out)}")
    return found


def ratio_rows(contests: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the table's rows, those first where we lose most."""
    rows = []
    for contest, found in contests.items():
        for name, one in found["ratios"].items():
            if "ratio" not in one:
                continue
            ratio, speed, least = one["ratio"], one["tokens_per_second"], promised(contest, name)
            kept = "" if ratio["median"] >= least else ", **not kept**"
            spread = f"{ratio['least']:.2f} to {ratio['most']:.2f}"
            if "median_within" in ratio:
                spread += "; median {:.2f} to {:.2f}".format(*ratio["median_within"])
            cells = (contest, name, f"{ratio['median']:.2f}", spread)
            speeds = f"{speed['median']:,.0f} ({speed['least']:,.0f} to {speed['most']:,.0f})"
            rows.append((ratio["median"], (*cells, f"{least:g}{kept}", speeds)))
    return [cells for _, cells in sorted(rows)]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in rows)])


def render(found: Mapping[str, Any]) -> str:
    """Return the results as a page of Markdown."""
    machine, settings, contests = found["machine"], found["settings"], found["contests"]
    ours = [
        f"{contest}: {one['ratios'][name]['tokens_per_second']['median']:,.0f}"
        for contest, one in contests.items()
        for name in list(one["ratios"])[:1]
    ]
    absent = [(contest, name, why) for contest, one in contests.items() for name, why in one["errors"].items()]
    absent += [("all", name, why) for name, why in NOT_TO_BE_HAD.items()]
    shares = [
        (str(size), *(f"{one[how]:.1%}" for how in ("laid out", "packed", "random")))
        for size, one in found["padding"].items()
    ]
    head = ("contest", "against", "ratio", "least to most", "promised", "its trained tokens/s (least to most)")
    parts = [
        f"# Training speed, {found['date']}",
        f"{machine['cpu']}, {machine['cores']} cores; "
        f"{settings['processes']} processes of {settings['threads']} thread. A ratio is finetune.py's trained tokens a "
        "second by the other's in the same round; medians, the lowest first, with least and most and, for ten rounds, "
        "what holds the true median in 95 of 100 such contests. TRL keeps the Trainer's default for adapters, "
        "ddp_find_unused_parameters, which walks the graph; the others have it off. Its adapter of a quantised model, "
        "which it would put into bfloat16, is trained in float32 as all others are.",
        table(head, ratio_rows(contests)),
        f"finetune.py, trained tokens a second: {'; '.join(ours)}.",
        "## Padding",
        "Positions without a token at a global batch of 64, in one epoch.",
        table(("micro-batch", "laid out by length", "packed", "random batches"), shares),
        "## Not compared",
        table(("contest", "who", "why"), absent),
    ]
    parts += [part for name, one in contests.items() for part in parts_of(name, one)]
    parts += ["## Versions", "\n".join(versions_by_contestant(contests))]
    parts += said_of_promises(found["broken_promises"], unmeasured(contests))
    return "\n\n".join(parts) + "\n"


def said_of_promises(broken: Sequence[str], left_out: Sequence[str]) -> list[str]:
    """Return what became of the promises: those not kept, and what was not measured, of which none is known."""
    parts = ["## Promises not kept", *(f"- {one}" for one in broken)] if broken else []
    if left_out:
        parts += ["## Not measured", "Whether what is promised of these is kept is not known:"]
        parts += [f"- {one}" for one in left_out]
    if broken:
        return parts
    return [*parts, "What was measured keeps its promises."] if left_out else ["All promises are kept."]


def parts_of(name: str, contest: Mapping[str, Any]) -> list[str]:
    """Return what is said of one contest: what was trained, where and by which commands."""
    checked = {who: check for who, check in contest["checks"].items() if "trains" in check}
    seen = [
        (who, f"{check['first_loss']:.6f}", f"{check['gradient_norm']:.4f}", f"{check['moved']:.4f}")
        for who, check in checked.items()
    ]
    runs = f"{contest['rounds']} rounds ({contest['pairs']} of the closest two) of {contest['steps']} optimizer steps"
    return [
        f"## {name}",
        f"{contest['model_rows_and_batch']}, {runs}. {said_of_place(contest)}",
        said_of_training(checked),
        table(("who", "first loss", "norm of the first gradient", "norm of B after three steps"), seen),
        "\n".join(f"- {who}: `{command}`" for who, command in contest["commands"].items()),
    ]


def said_of_place(contest: Mapping[str, Any]) -> str:
    """Return by which command and code a contest was held, and how busy the machine was."""
    where = contest["where"]
    loads = [f"{load[0]:.1f}" for load in (where["machine"]["load_average"], contest["load_average_after"])]
    code = f"commit {where['commit'][:10]}" if where["commit"] else "no commit"
    changed = " with changes" if where["uncommitted_changes"] else ""
    return f"Held by `{where['command']}`, {code}{changed}; load average {loads[0]} before and {loads[1]} after."


def said_of_training(checks: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what all contestants train alike, which was compared before times were."""
    trains = next(iter(checks.values()))["trains"]
    [settings] = trains["settings"]
    chosen = ", ".join(f"{name} {value}" for name, value in settings.items())
    types = ", ".join(one.replace("torch.", "") for one in trains["types"])
    return f"All train {trains['numbers']:,} numbers ({types}) by {trains['optimizer']} ({chosen}):"


def versions_by_contestant(contests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each contestant with what it ran on."""
    found: dict[str, dict[str, str]] = {}
    for one in contests.values():
        found |= {who: check["versions"] for who, check in one["checks"].items() if "versions" in check}
    return [f"- {who}: {', '.join(f'{name} {number}' for name, number in seen.items())}" for who, seen in found.items()]
