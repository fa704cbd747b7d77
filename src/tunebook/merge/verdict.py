"""Whether a merged model says what the adapter says, as far as rounding allows, and the figures as a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tunebook.merge.verifying import Probe, Reading

# Float32 rounds a number by 6e-8 of itself; what some tens of layers make of that is below this.
FLOAT32_ALLOWED = 1e-4
# A narrower type may cost the merged model so many times what it costs the base alone, for logits of the same size:
# what is rounded is a part of each number, and an adapter on a base without training makes logits several times larger.
TIMES_BASE_ROUNDING = 3.0


@dataclass(frozen=True)
class Readings:
    """What each model says to the probe and to the greedy answers of the merged model, `answers`.

    Base and adapter stand on unquantised weights and are computed in float32. `merged` was read back from disk and
    computed in its own type, as `rounded_base` was (None where that is float32). `trained` is the adapter on the base
    as it was trained on, None where that was not quantised.
    """

    answers: tuple[tuple[int, ...], ...]
    merged: Reading
    adapter: Reading
    base: Reading
    rounded_base: Reading | None = None
    trained: Reading | None = None


@dataclass(frozen=True)
class Difference:
    """Largest and mean difference of logits, and how many of how many greedy answers are those of the merged model."""

    largest: float
    mean: float
    same_answers: tuple[int, int] | None = None


@dataclass(frozen=True)
class Verification:
    """How far models are apart: each against the adapter on the unquantised base in float32, but for `rounding`.

    `rounding` is the base alone in the merged type against float32 (None in float32), `growth` how many times larger
    the adapter's logits are than the base's (1 where they are not), `allowed` the largest difference of `merged` that
    passes. `weight_error` is what rounding the weights takes from the adapter's change of them, as a
    part of it.
    """

    dtype: str
    probe: str
    num_positions: int
    merged: Difference
    allowed: float
    growth: float
    base: Difference
    rounding: Difference | None
    trained: Difference | None
    weight_error: float

    @property
    def passed(self) -> bool:
        """Whether the merged model differs no more than rounding explains; NaN does not pass."""
        return self.merged.largest <= self.allowed


def judge(readings: Readings, probe: Probe, dtype: str, weight_error: float) -> Verification:
    """Return the differences between the readings, and how large that of the merged model may be."""
    one, same = readings, count_same(readings.adapter, readings.answers)
    rounding = None if one.rounded_base is None else _compare(one.rounded_base, one.base)
    growth = max(1.0, float(one.adapter.logits.abs().max() / one.base.logits.abs().max()))
    merged, trained = _compare(one.merged, one.adapter, same), None
    if one.trained is not None:
        trained = _compare(one.trained, one.adapter, count_same(one.trained, one.answers))
    return Verification(
        dtype=dtype,
        probe=probe.name,
        num_positions=len(one.merged.logits),
        merged=merged,
        allowed=FLOAT32_ALLOWED if rounding is None else TIMES_BASE_ROUNDING * growth * rounding.largest,
        growth=growth,
        base=_compare(one.base, one.adapter),
        rounding=rounding,
        trained=trained,
        weight_error=weight_error,
    )


def render_verification(found: Verification, quantisation: str) -> str:
    """Return the figures as a Markdown table with a sentence on each side; `quantisation` is such as `4-bit`."""
    where = f"the {quantisation} base that it was trained on"
    rows = [
        ("the merged model, read back from disk", found.merged, f"{found.allowed:.2g}"),
        (f"the adapter on {where}", found.trained, "reported only"),
        ("the base without the adapter", found.base, ""),
        (f"the base alone: {found.dtype} against float32", found.rounding, ""),
    ]
    lines = [
        f"Logits at {found.num_positions} positions of {found.probe}, against those of the adapter on the unquantised "
        f"base in float32; the merged model computes in {found.dtype}.",
        "",
        "| | largest difference | mean | allowed | greedy text of the merged model |",
        "|---|---|---|---|---|",
        *(_line(name, difference, allowed) for name, difference, allowed in rows if difference is not None),
    ]
    if found.rounding is not None:
        grown = f" {found.growth:.1f} (so much larger the adapter makes logits)" if found.growth > 1.05 else ""
        lines += ["", f"Allowed is {TIMES_BASE_ROUNDING:g} times{grown} what {found.dtype} does to the base alone."]
        lines[-1] += f" Rounding the weights takes {found.weight_error:.2%} of what the adapter changes in them."
        if found.base.largest <= found.allowed:
            lines[-1] += " The adapter changes less than rounding may: float32 would show, and keep, more of it."
    return "\n".join(lines)


def render_answers(readings: Readings, tokenizer: Any) -> list[str]:
    """Return a line for each prompt: the merged model's greedy text, and where the adapter would leave it."""
    lines = []
    for number, (answer, chosen) in enumerate(zip(readings.answers, readings.adapter.choices, strict=True), 1):
        line = f"greedy text {number}: {tokenizer.decode(answer)!r}"
        place = next((place for place, token in enumerate(answer) if chosen[place] != token), None)
        if place is not None:
            line += f"; after {place} tokens the adapter says {tokenizer.decode([chosen[place]])!r}"
        lines.append(line)
    return lines


def count_same(reading: Reading, answers: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return how many of how many answers a model would have given itself, token by token."""
    pairs = zip(reading.choices, answers, strict=True)
    return sum(tuple(chosen) == tuple(answer) for chosen, answer in pairs), len(answers)


def _compare(one: Reading, other: Reading, same_answers: tuple[int, int] | None = None) -> Difference:
    difference = (one.logits - other.logits).abs()
    return Difference(float(difference.max()), float(difference.mean()), same_answers)


def _line(name: str, found: Difference, allowed: str) -> str:
    same = "" if found.same_answers is None else "{} of {}".format(*found.same_answers)
    return f"| {name} | {found.largest:.2g} | {found.mean:.2g} | {allowed} | {same} |"
