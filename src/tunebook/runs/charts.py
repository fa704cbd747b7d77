"""The geometry of a chart: where its curves, ticks and bars lie in the user units of an SVG. No drawing here."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 420, 230
LEFT, RIGHT, TOP, BOTTOM = 54, 24, 10, 30
# A chart is hardly wider than this many pixels; of more points the extremes of each stretch are kept.
MAX_POINTS = 400
# Numbers that are nearer to each other, by their size, are one on an axis: their difference is what rounding left.
SAME = 1e-6
SMALLEST = 1e-300
# Up to here every point is seen; beyond, the line alone.
MAX_DOTS = 60

Point = tuple[int, float]


@dataclass(frozen=True)
class Tick:
    """A mark on an axis, in user units along it."""

    at: float
    text: str


@dataclass(frozen=True)
class Dot:
    """A measured point, and what it says when the pointer rests on it."""

    x: float
    y: float
    title: str


@dataclass(frozen=True)
class Curve:
    """One run's values: `lines` are stretches without a gap, since NaN and infinity have no place on an axis."""

    run: int
    lines: tuple[str, ...]
    dots: tuple[Dot, ...]
    num_measured: int
    gaps: tuple[int, ...]

    @property
    def has_dots(self) -> bool:
        """Whether the points are so few that each is drawn."""
        return len(self.dots) <= MAX_DOTS


@dataclass(frozen=True)
class Chart:
    """Curves of several runs over steps, or the bars of one histogram; `unit` stands behind the title."""

    title: str
    unit: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    curves: tuple[Curve, ...] = ()
    bars: tuple[tuple[float, float, float, str], ...] = ()
    x_label: str = "step"

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured."""
        return not any(curve.num_measured for curve in self.curves) and not self.bars


def build_curves(
    title: str, measured: Sequence[tuple[int, str, Sequence[Point]]], unit: str = "", scale: float = 1.0
) -> Chart:
    """Return the chart of (run number, run name, points); values are divided by `scale`."""
    drawn = [(x, y / scale) for _, _, points in measured for x, y in points if is_drawable(y)]
    steps = [x for _, _, points in measured for x, _ in points]
    x_ticks = nice_ticks(min(steps, default=0), max(steps, default=1), 6, whole=True)
    y_ticks = nice_ticks(min((y for _, y in drawn), default=0.0), max((y for _, y in drawn), default=1.0), 5)
    across = _scale(min(steps, default=0), max(steps, default=1), LEFT, WIDTH - RIGHT)
    up = _scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    curves = []
    for run, name, points in measured:
        scaled = [(x, y / scale) for x, y in points]
        curves.append(_curve(run, name, scaled, across, up, unit))
    low, high = min(steps, default=0), max(steps, default=1)
    return Chart(
        title,
        unit,
        tuple(Tick(across(value), f"{value:,.0f}") for value in x_ticks if low <= value <= high),
        tuple(Tick(up(value), text) for value, text in zip(y_ticks, tick_texts(y_ticks), strict=True)),
        tuple(curves),
    )


def build_histogram(title: str, lengths: Mapping[str, Any]) -> Chart:
    """Return the bars of a histogram as rows.json has it: counts of rows over lengths in tokens."""
    start, width, counts = int(lengths["start"]), int(lengths["width"]), [int(one) for one in lengths["counts"]]
    end, y_ticks = start + width * max(len(counts), 1), nice_ticks(0, max(counts, default=1), 5, whole=True)
    across, up = _scale(start, end, LEFT, WIDTH - RIGHT), _scale(0, y_ticks[-1], HEIGHT - BOTTOM, TOP)
    bars = []
    for number, count in enumerate(counts):
        low = start + number * width
        bounds = f"{low:,}" if width == 1 else f"{low:,} to {low + width - 1:,}"
        words = "1 row" if count == 1 else f"{count:,} rows"
        x, right, y = across(low), across(low + width), up(count)
        bars.append((x, max(right - x - 1, 0.5), y, f"{bounds} tokens: {words}"))
    x_ticks = [value for value in nice_ticks(start, end, 6, whole=True) if start <= value <= end]
    return Chart(
        title,
        "rows",
        tuple(Tick(across(value), f"{value:,.0f}") for value in x_ticks),
        tuple(Tick(up(value), f"{value:,.0f}") for value in y_ticks),
        bars=tuple(bars),
        x_label="tokens of a row",
    )


def is_drawable(value: float) -> bool:
    """Whether a number has a place on an axis: neither NaN nor infinite, nor so large that a span of two would be."""
    return math.isfinite(value) and abs(value) < 1e300


def nice_ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Return up to `most` + 2 round numbers, evenly apart, from at or below `low` to at or above `high`."""
    size_of_both = max(abs(low), abs(high))
    if not high - low > max(0 if whole else size_of_both * SAME, SMALLEST):
        room = size_of_both * 0.1 if size_of_both > SMALLEST else 1.0
        low, high = low - (0 if low == 0 else room), high + room
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(digit * size for digit in (1, 2, 5, 10) if digit * size >= rough * 0.999)
    if whole:
        step = max(step, 1.0)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def tick_texts(values: Sequence[float]) -> list[str]:
    """Return the values as short text, all with as many digits as tell neighbours apart."""
    largest, step = max(abs(value) for value in values), values[1] - values[0] if len(values) > 1 else 1.0
    if largest >= 1e5 or step < 1e-3:
        digits = max(0, math.floor(math.log10(largest or 1.0)) - math.floor(math.log10(step * 1.0001)))
        return ["0" if value == 0 else _short_exponent(f"{value:.{digits}e}") for value in values]
    decimals = max(0, -math.floor(math.log10(step * 1.0001)))
    return [f"{value:,.{decimals}f}" for value in values]


def thin(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Return at most `most` of the points: of each stretch its lowest and its highest, besides the first and last."""
    if len(points) <= most:
        return list(points)
    num_stretches, inner = (most - 2) // 2, range(1, len(points) - 1)
    kept = {0, len(points) - 1}
    for number in range(num_stretches):
        bounds = (len(inner) * part // num_stretches + 1 for part in (number, number + 1))
        stretch = range(*bounds)
        kept |= {min(stretch, key=lambda place: points[place][1]), max(stretch, key=lambda place: points[place][1])}
    return [points[place] for place in sorted(kept)]


def _curve(  # noqa: PLR0913, PLR0917 - a run's values and the two axes
    run: int, name: str, points: Sequence[Point], across: "Axis", up: "Axis", unit: str
) -> Curve:
    stretches: list[list[Point]] = [[]]
    for point in points:
        if is_drawable(point[1]):
            stretches[-1].append(point)
        elif stretches[-1]:
            stretches.append([])
    whole = [stretch for stretch in stretches if stretch]
    total = sum(map(len, whole))
    drawn = [thin(stretch, max(4, MAX_POINTS * len(stretch) // total)) for stretch in whole]
    lines = tuple(" ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in stretch) for stretch in drawn)
    behind = f" {unit}" if unit else ""
    dots = tuple(Dot(across(x), up(y), f"{name}, step {x:,}: {y:.6g}{behind}") for stretch in drawn for x, y in stretch)
    return Curve(run, lines, dots, total, tuple(x for x, y in points if not is_drawable(y)))


Axis = Callable[[float], float]


def _scale(low: float, high: float, start: float, end: float) -> Axis:
    """Return the function that lays numbers from `low` to `high` on an axis; a single number goes to its middle."""
    if high == low:
        return lambda value: (start + end) / 2
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _short_exponent(text: str) -> str:
    """Return `1.5e-4` for `1.5e-04`."""
    digits, _, exponent = text.partition("e")
    return f"{digits}e{int(exponent)}"
