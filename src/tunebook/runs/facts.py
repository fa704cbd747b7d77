"""What a report says of its runs in words and tables: facts side by side, the recipes' differences, the samples."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tunebook.card.public_text import shown_value
from tunebook.plan.arithmetic import counted
from tunebook.runs.charts import is_drawable
from tunebook.runs.past import PastRun
from tunebook.system.secret_text import hide_paths, hide_tokens

LONGEST_TEXT = 2000
NOT_THERE = "\N{EN DASH}"


@dataclass(frozen=True)
class Row:
    """A line of a table with one cell for each run."""

    label: str
    cells: tuple[str, ...]
    differs: bool


@dataclass(frozen=True)
class Answer:
    """What a run's model answered to a held-out prompt before and after training; None where it did not get there."""

    run: int
    before: str | None
    after: str | None
    is_right: bool


@dataclass(frozen=True)
class Sample:
    """A held-out prompt with its right answer, and what the runs made of it."""

    prompt: str
    answer: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class TokenShare:
    """What the positions of a run's training rows hold, each as a fraction of all."""

    run: int
    trained: float
    untrained: float
    padding: float
    text: str


def collect_facts(runs: Sequence[PastRun]) -> list[Row]:
    """Return the facts that at least one of the runs knows, in the order they are read."""
    facts = {label: tuple(_fact(show, run) for run in runs) for label, show in FACTS.items()}
    versions = [_mapping(run.summary, "versions") for run in runs]
    for name in sorted({name for one in versions for name in one}):
        facts[name] = tuple(_public(str(one.get(name, NOT_THERE))) for one in versions)
    # What a run does not know is no other value.
    known = {label: set(cells) - {NOT_THERE} for label, cells in facts.items()}
    return [Row(label, cells, len(known[label]) > 1) for label, cells in facts.items() if known[label]]


def compare_recipes(runs: Sequence[PastRun]) -> list[Row]:
    """Return every key of the recipes with its value in each run; a recipe that can't be read is not compared."""
    found = []
    for key in dict.fromkeys(key for run in runs for key in run.recipe):
        values = {_value(run.recipe, key) for run in runs if run.recipe}
        found.append(Row(key, tuple(_value(run.recipe, key) for run in runs), len(values) > 1))
    return found


def collect_samples(runs: Sequence[PastRun]) -> list[Sample]:
    """Return the held-out prompts of all runs, those that several were asked once."""
    found: dict[tuple[str, str], list[Answer]] = {}
    for number, run in enumerate(runs):
        entries = run.rows.get("samples")
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, dict) and isinstance(entry.get("prompt"), str):
                right, before, after = (_text(entry.get(name)) for name in ("answer", "before", "after"))
                is_right = after is not None and after.strip() == (right or "").strip()
                answer = Answer(number, _shortened(before), _shortened(after), is_right)
                found.setdefault((entry["prompt"], right or ""), []).append(answer)
    return [
        Sample(_shortened(prompt) or "", _shortened(right) or "", tuple(answers))
        for (prompt, right), answers in found.items()
    ]


def collect_shares(runs: Sequence[PastRun]) -> list[TokenShare]:
    """Return what the positions that went through the model held; of a run without an end, what its rows hold."""
    shares = []
    for number, run in enumerate(runs):
        positions = [run.summary.get(name) for name in ("trained_tokens", "processed_tokens", "padded_tokens")]
        if not all(_is_count(one) for one in positions) or not positions[1]:
            positions = [run.rows.get("trained_tokens"), run.rows.get("tokens"), 0]
        if all(_is_amount(one) for one in positions) and positions[1]:
            trained, processed, padded = (int(one) for one in positions if one is not None)
            parts = (trained / processed, (processed - padded - trained) / processed, padded / processed)
            text = f"{processed:,} positions: {parts[0]:.1%} trained, {parts[1]:.1%} read only, {parts[2]:.1%} padding"
            shares.append(TokenShare(number, *parts, text))
    return shares


def memory_unit(largest: float) -> tuple[str, float]:
    """Return the unit for amounts of memory up to `largest` bytes, and its size in bytes."""
    return ("GiB", 2.0**30) if largest >= 2**30 else ("MiB", 2.0**20)


def _steps(run: PastRun) -> str:
    done, planned = run.summary.get("num_optimizer_steps"), run.plan.get("num_optimizer_steps")
    if not _is_count(done):
        done = max((event["step"] for event in run.events), default=0)
    return f"{done:,} of {planned:,}" if _is_count(planned) else f"{done:,}"


def _rows(run: PastRun) -> str:
    parts = [("num_train_rows", "to train"), ("num_eval_rows", "held out")]
    more = [("num_quarantined_rows", "unusable"), ("num_truncated_rows", "cut"), ("num_dropped_rows", "dropped")]
    parts += [(name, words) for name, words in more if run.summary.get(name)]
    known = [(run.summary.get(name), words) for name, words in parts]
    return ", ".join(f"{count:,} {words}" for count, words in known if _is_count(count)) or NOT_THERE


def _batch(run: PastRun) -> str:
    names = ("global_batch_size", "world_size", "per_device_train_batch_size", "gradient_accumulation_steps")
    sizes = [run.summary.get(name) for name in names]
    if not all(_is_count(size) for size in sizes):
        return NOT_THERE
    nouns = ("row", "process", "row", "micro-step")
    whole, *parts = (counted(int(size or 0), noun) for size, noun in zip(sizes, nouns, strict=True))
    return f"{whole} = {' x '.join(parts)}"


def _computed_on(run: PastRun) -> str:
    kind = run.summary.get("hardware") or run.summary.get("device")
    return f"{run.summary.get('device')}: {kind}" if run.summary.get("hardware") else str(kind or NOT_THERE)


def _number(name: str, form: str = ".4f") -> Callable[[PastRun], str]:
    def show(run: PastRun) -> str:
        value = run.summary.get(name)
        try:
            return format(value, form) if isinstance(value, int | float) else NOT_THERE
        except ValueError:
            return str(value)

    return show


def _word(name: str, most: int = LONGEST_TEXT) -> Callable[[PastRun], str]:
    return lambda run: NOT_THERE if run.summary.get(name) is None else _public(str(run.summary[name]))[:most]


def _memory(run: PastRun) -> str:
    peak = run.summary.get("peak_memory_bytes")
    if not isinstance(peak, int | float) or not is_drawable(peak):
        return NOT_THERE
    unit, size = memory_unit(peak)
    return f"{peak / size:,.1f} {unit}"


def _time(run: PastRun) -> str:
    seconds = run.summary.get("wall_seconds")
    if not isinstance(seconds, int | float) or not is_drawable(seconds) or seconds < 0:
        return NOT_THERE
    return f"{seconds:.1f} s" if seconds < 90 else str(timedelta(seconds=round(seconds)))


FACTS: Mapping[str, Callable[[PastRun], str]] = {
    "status": lambda run: run.status,
    "error": _word("error"),
    "steps": _steps,
    "base": _word("model"),
    "base revision": _word("model_revision", 12),
    "method": _word("method"),
    "compute type": _word("compute_dtype"),
    "rows": _rows,
    "data fingerprint": _word("data_fingerprint", 12),
    "batch": _batch,
    "learning rate": _number("learning_rate", ".3g"),
    "seed": _word("seed"),
    "loss, first": _number("first_loss"),
    "loss, last": _number("final_loss"),
    "held-out loss before": _number("eval_loss_before"),
    "held-out loss after": _number("eval_loss"),
    "right tokens held out": _number("eval_token_accuracy", ".1%"),
    "exact matches before": _number("exact_match_before", ".1%"),
    "exact matches after": _number("exact_match_after", ".1%"),
    "trained tokens": _number("trained_tokens", ",d"),
    "trained tokens/s": _number("tokens_per_second", ",.0f"),
    "peak memory of a process": _memory,
    "time in all": _time,
    "computed on": _computed_on,
    "recipe": lambda run: str(run.summary.get("recipe") or NOT_THERE).rpartition("/")[2],
    "adapter": _word("adapter_sha256", 12),
}


def _mapping(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}


def _value(recipe: Mapping[str, Any], key: str) -> str:
    if key not in recipe:
        return NOT_THERE
    value = shown_value(recipe[key])
    return _public(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


def _fact(show: Callable[[PastRun], str], run: PastRun) -> str:
    """Return what a run says of itself: nothing where its file, written by something else, holds no such number."""
    try:
        return _public(show(run))
    except (ValueError, ArithmeticError):
        return NOT_THERE


def _public(text: str) -> str:
    """Return a text as it can be shown to others: without places of this machine, and without tokens."""
    return hide_tokens(hide_paths(text))


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _shortened(text: str | None) -> str | None:
    if text is None or len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]} ... ({len(text) - LONGEST_TEXT:,} more characters)"


def _is_amount(value: Any) -> bool:
    return _is_count(value) and 0 <= value < 2**63


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
