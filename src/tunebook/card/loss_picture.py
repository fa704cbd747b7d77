"""loss.png: the training loss and the held-out loss of a run over its steps.

Drawn with Pillow: one package of 7 MB without dependencies, imported in milliseconds, where a plotting library would
bring ten and cost each run a second. (SVG would need none, but the Hub's pages are only sure to show PNG.)
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 900, 480
# Drawn twice as large and made smaller, which smooths the lines.
SCALE = 2
LEFT, RIGHT, TOP, BOTTOM = 80, 32, 48, 60
INK, GRID = "#333333", "#dddddd"
# As in a report's charts: nearer numbers are one, and their difference is what rounding left.
SAME, SMALLEST = 1e-6, 1e-300
Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Curve:
    """A named curve: its points by step, and whether each is marked."""

    name: str
    colour: str
    points: Points
    marked: bool


def read_metrics(run_dir: Path, last_step: int | None = None) -> list[dict[str, Any]]:
    """Return the events of metrics.jsonl up to a step; lines that cannot be read are left out."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    events = []
    for line in lines:
        try:
            event = json.loads(line)
            is_wanted = last_step is None or event["step"] <= last_step
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if is_wanted:
            events.append(event)
    return events


def draw_losses(events: Sequence[Mapping[str, Any]]) -> bytes | None:
    """Return the picture as PNG, None where no loss was logged; the same events give the same bytes."""
    curves = [
        Curve("training", "#1f6fb4", _points(events, "loss"), marked=False),
        Curve("held out", "#d9680f", _points(events, "eval_loss"), marked=True),
    ]
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return None
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), "white")
    _Plot(ImageDraw.Draw(image), ImageFont.load_default(15 * SCALE), curves).draw()
    file = BytesIO()
    # So few colours need no more than a palette: 7 KB and 10 ms instead of 31 KB and 60 ms.
    image.reduce(SCALE).quantize(64, Image.Quantize.FASTOCTREE).save(file, "PNG")
    return file.getvalue()


def _points(events: Iterable[Mapping[str, Any]], name: str) -> Points:
    """Return the finite values of a metric by step, the last one where a step was measured again."""
    values = {event["step"]: event[name] for event in events if isinstance(event.get(name), int | float)}
    return sorted((step, float(value)) for step, value in values.items() if math.isfinite(value))


def find_ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Return round numbers, at most `most` of them, from the last one not above `low` to the first not below `high`."""
    size = max(abs(low), abs(high))
    span = high - low if high - low > max(size * SAME, SMALLEST) else size if size > SMALLEST else 1.0
    rough = span / (most - 2)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


class _Plot:
    """Axes, curves and their names on a canvas of WIDTH x HEIGHT, in its units."""

    def __init__(self, canvas: Any, font: Any, curves: Sequence[Curve]) -> None:
        self._canvas, self._font, self._curves = canvas, font, curves
        values = [value for curve in curves for _, value in curve.points]
        steps = [step for curve in curves for step, _ in curve.points]
        self._losses = find_ticks(min(values), max(values))
        self._steps = [tick for tick in find_ticks(0, max(*steps, 1)) if tick == int(tick)]

    def draw(self) -> None:
        # As many as tell neighbours apart; 2.5 is a step as well.
        gap = self._losses[1] - self._losses[0]
        decimals = next((number for number in range(7) if math.isclose(round(gap, number), gap)), 7)
        for loss in self._losses:
            y = self._y(loss)
            self._line([(LEFT, y), (WIDTH - RIGHT, y)], GRID, 1)
            self._text(LEFT - 10, y, f"{loss:,.{decimals}f}" if decimals < 7 else f"{loss:.2g}", "rm")
        for step in self._steps:
            self._text(self._x(step), HEIGHT - BOTTOM + 16, f"{step:,.0f}", "mm")
        self._line([(LEFT, HEIGHT - BOTTOM), (WIDTH - RIGHT, HEIGHT - BOTTOM)], INK, 1.5)
        self._text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 18, "optimizer step", "mm")
        self._text(LEFT - 10, 22, "loss", "rm")
        for number, curve in enumerate(self._curves):
            x = LEFT + 130 * number
            self._line([(x, 22), (x + 26, 22)], curve.colour, 3)
            self._text(x + 34, 22, curve.name, "lm")
            self._draw_curve(curve)

    def _draw_curve(self, curve: Curve) -> None:
        places = [(self._x(step), self._y(value)) for step, value in curve.points]
        # Between two measurements far apart a line would claim what nobody measured.
        if len(places) > (2 if curve.marked else 1):
            self._line(places, curve.colour, 2)
        for x, y in places if curve.marked or len(places) == 1 else ():
            box = [(x - 4) * SCALE, (y - 4) * SCALE, (x + 4) * SCALE, (y + 4) * SCALE]
            self._canvas.ellipse(box, fill=curve.colour)

    def _x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / self._steps[-1]

    def _y(self, loss: float) -> float:
        low, high = self._losses[0], self._losses[-1]
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (loss - low) / (high - low)

    def _line(self, places: Sequence[tuple[float, float]], colour: str, width: float) -> None:
        scaled = [(x * SCALE, y * SCALE) for x, y in places]
        self._canvas.line(scaled, fill=colour, width=round(width * SCALE), joint="curve")

    def _text(self, x: float, y: float, text: str, anchor: str) -> None:
        self._canvas.text((x * SCALE, y * SCALE), text, fill=INK, font=self._font, anchor=anchor)
