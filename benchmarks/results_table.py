"""The ratios of a contest, what is promised of them, and all results as a page of Markdown."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from contest import BY_HAND, TRL, TRL_REBALANCED, Run
from peers import NOT_TO_BE_HAD

# finetune.py's trained tokens a second by the other's, at least: in every contest, and in those of the larger model.
EVERYWHERE = {BY_HAND: 0.97}
AT_THE_LARGER_SIZE = {TRL: 2.5, TRL_REBALANCED: 1.5}
OF_ANY_OTHER = 1.0


def ratios_of(runs: Mapping[str, Sequence[Run]], ours: str) -> dict[str, dict[str, Any]]:
    """Return by contestant how many times faster `ours` was: median, least and most of the ratios inside the rounds."""
    found: dict[str, dict[str, Any]] = {}
    for name, theirs in runs.items():
        speeds = [run.tokens_per_second for run in theirs]
        found[name] = {"tokens_per_second": _spread(speeds, 1)}
        if name != ours:
            pairs = zip(runs[ours], theirs, strict=True)
            found[name]["ratio"] = _spread(
                [mine.tokens_per_second / other.tokens_per_second for mine, other in pairs], 3
            )
    return found


def _spread(values: Sequence[float], digits: int) -> dict[str, float]:
    middle, least, most = statistics.median(values), min(values), max(values)
    return {"median": round(middle, digits), "least": round(least, digits), "most": round(most, digits)}


def promised(contest: str, name: str) -> float:
    """Return the least ratio that is promised of finetune.py against a contestant."""
    at_size = AT_THE_LARGER_SIZE if contest.startswith("larger") else {}
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


def ratio_rows(contests: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the table's rows, those first where we lose most."""
    rows = []
    for contest, found in contests.items():
        for name, one in found["ratios"].items():
            if "ratio" not in one:
                continue
            ratio, speed, least = one["ratio"], one["tokens_per_second"], promised(contest, name)
            kept = "" if ratio["median"] >= least else ", **not kept**"
            cells = (contest, name, f"{ratio['median']:.2f}", f"{ratio['least']:.2f} to {ratio['most']:.2f}")
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
    loads = [f"{load[0]:.1f}" for load in (machine["load_average"], machine["load_average_after"])]
    parts = [
        f"# Training speed, {found['date']}",
        f"{machine['cpu']}, {machine['cores']} cores, load average {loads[0]} before and {loads[1]} after; "
        f"{settings['processes']} processes of {settings['threads']} thread. A ratio is finetune.py's trained tokens a "
        "second by the other's in the same round; medians, the lowest first. TRL keeps the Trainer's default for "
        "adapters, ddp_find_unused_parameters, which walks the graph; the others have it off.",
        table(head, ratio_rows(contests)),
        f"finetune.py, trained tokens a second: {'; '.join(ours)}.",
        "## Padding",
        "Positions without a token at a global batch of 64, in one epoch.",
        table(("micro-batch", "laid out by length", "packed", "random batches"), shares),
        "## Not compared",
        table(("contest", "who", "why"), absent),
    ]
    for name, one in contests.items():
        losses = "; ".join(f"{who} {loss:.6f}" for who, loss in one["first_losses"].items() if loss is not None)
        runs = f"{one['rounds']} rounds of {one['steps']} optimizer steps"
        parts += [f"## {name}", f"{one['model_rows_and_batch']}, {runs}. First loss of one global batch: {losses}."]
        parts.append("\n".join(f"- {who}: `{command}`" for who, command in one["commands"].items()))
    parts += ["## Versions", "\n".join(versions_by_contestant(contests))]
    broken = found["broken_promises"]
    parts += ["## Promises not kept", *(f"- {one}" for one in broken)] if broken else ["All promises are kept."]
    return "\n\n".join(parts) + "\n"


def versions_by_contestant(contests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each contestant with what it ran on."""
    found: dict[str, dict[str, str]] = {}
    for one in contests.values():
        found |= one["versions"]
    return [f"- {who}: {', '.join(f'{name} {number}' for name, number in seen.items())}" for who, seen in found.items()]
