"""Line charts and stacked bars as inline SVG, with colors from the page's CSS."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from ptfast.core.units import format_metric, grouped, is_fraction, num_bytes, short_count

Points = Sequence[tuple[float, float]]

SCRIPT_FILE = Path(__file__).with_name("charts.js")
"""The script that redraws curves when `curve_controls` change."""
NUM_COLORS = 8
WIDTH, HEIGHT = 560, 270
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 10, 40
MAX_POINTS = 300
MAX_MARKERS = 40
TITLES = {
    "lr": "learning rate",
    "samples_per_s": "throughput (samples/s)",
    "grad_norm": "gradient norm",
    "memory_bytes": "memory",
    "cpu_cores": "processor cores busy",
    "gpu_use": "GPU use",
}
"""Titles of metrics that differ from their names."""
FROM_ZERO = ("cpu_cores", "gpu_use")
"""Metrics whose axis starts at 0, in addition to rates and memory."""


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    """The name in the legend; no legend entry if empty."""
    points: Points
    """(x, y), sorted by x, all finite."""
    color: int = 0
    """Index into the page's palette, which repeats."""
    radius: float = 2.6

    @property
    def css(self) -> str:
        """The CSS color class; lines are dashed in every second pass through the palette."""
        return line_color(self.color) + (" dash" if self.color // NUM_COLORS % 2 else "")


@dataclass(frozen=True)
class Axis:
    """An axis: its range, its ticks and their labels, and its start and end in pixels."""

    low: float
    high: float
    ticks: Sequence[float]
    label: Callable[[float], str]
    start: float
    stop: float
    is_log: bool = False

    def place(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (value - low) / (high - low) * (self.stop - self.start)


def line_chart(name: str, series: Sequence[Series], last_step: float, title: str | None = None) -> str:
    """Return a chart of the metric `name` over steps 0 to `last_step`.

    The name determines the format of values. Positive values that span more than a factor of 50 get a log
    scale; rates such as samples per second start at 0. Long series are thinned to means of neighbors.
    """
    thinned = [replace(s, points=thin(s.points)) for s in series if s.points]
    if not thinned:
        return ""
    # Ticks are at integer steps.
    last_step = max(last_step, 1)
    spacing = max(1, math.ceil(_nice(last_step / 6)))
    steps = range(0, int(last_step) + 1, spacing)
    x_axis = Axis(0, last_step, steps, grouped, LEFT, WIDTH - RIGHT)
    y_axis = _value_axis(name, [y for s in thinned for _, y in s.points])
    shapes = draw_axes(x_axis, y_axis, "step")
    for line in thinned:
        places = [(x_axis.place(x), y_axis.place(y)) for x, y in line.points]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        marks = [f'<path class="line" d="{path}"/>'] if len(places) > 1 else []
        if len(places) <= MAX_MARKERS:
            for (x, y), (step, value) in zip(places, line.points, strict=True):
                tip = escape(f"{line.name or 'best'} {format_metric(name, value)} at {grouped(step)}")
                place = f'cx="{x:.1f}" cy="{y:.1f}" r="{line.radius}"'
                marks.append(f"<circle {place}><title>{tip}</title></circle>")
        shapes.append(f'<g class="{line.css}">{"".join(marks)}</g>')
    title = escape((title or chart_title(name)) + (", log scale" if y_axis.is_log else ""))
    legend = "".join(f'<span class="key {s.css}"><i></i>{escape(s.name)}</span>' for s in thinned if s.name)
    return (
        f'<figure class="curve{" exact" * (name == "lr")}"><figcaption><b>{title}</b>{legend}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title} by step">'
        f"{''.join(shapes)}</svg></figure>"
    )


def stacked_bar(parts: Sequence[tuple[str, float]], colors: Sequence[str]) -> str:
    """Return a bar divided in proportion to `parts` (name, value), each colored by a CSS class."""
    total = sum(value for _, value in parts)
    if total <= 0:
        return ""
    rects, left = [], 0.0
    for (name, value), color in zip(parts, colors, strict=True):
        width = 1000 * value / total
        tip = f"<title>{escape(name)}: {value / total:.1%}</title>"
        place = f'x="{left:.2f}" width="{width:.2f}" height="28"'
        rects.append(f'<rect class="{color}" {place}>{tip}</rect>')
        left += width
    return f'<svg class="bar" viewBox="0 0 1000 28" preserveAspectRatio="none">{"".join(rects)}</svg>'


def line_color(index: int) -> str:
    return f"c{index % NUM_COLORS}"


def thin(
    points: Sequence[tuple[float, float]], max_points: int = MAX_POINTS
) -> Sequence[tuple[float, float]]:
    """Reduce to at most `max_points` points: means of neighbors, and the last point unchanged."""
    if len(points) <= max_points:
        return points
    size = math.ceil(len(points) / (max_points - 1))
    groups = [points[start : start + size] for start in range(0, len(points) - 1, size)]
    means = [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
    return [*means, points[-1]]


def is_logarithmic(name: str, low: float, high: float) -> bool:
    """Return True if a metric between `low` and `high` is plotted on a log scale."""
    return name != "lr" and not name.endswith("_per_s") and low > 0 and high / low > 50


def chart_title(name: str) -> str:
    """Return a metric's title, such as `throughput (samples/s)`."""
    return TITLES.get(name) or name.replace("_", " ")


def curve_controls(last_step: float, knots: Sequence[tuple[float, float, float]]) -> str:
    """Return controls for the x axis and the smoothing of curves, hidden unless `SCRIPT_FILE` runs.

    Args:
        knots: (step, epoch, seconds of training), sorted; the script interpolates linearly between them.
    """
    known = {"step": True, "epoch": any(knot[1] for knot in knots), "time": any(knot[2] for knot in knots)}
    radios = "".join(
        f'<label><input type="radio" name="axis" value="{place}"{" checked" * (place == 0)}>{name}</label>'
        for place, (name, is_known) in enumerate(known.items())
        if is_known
    )
    slider = '<label>smoothing <input type="range" name="smoothing" min="0" max="0.98" step="0.02" value="0">'
    rows = ",".join(f"[{step:.0f},{epoch:.5g},{seconds:.5g}]" for step, epoch, seconds in knots)
    box = f"[{LEFT},{WIDTH - RIGHT},{HEIGHT - BOTTOM}]"
    facts = f'data-box="{box}" data-last="{last_step:.0f}" data-knots="[{rows}]"'
    return f'<form id="controls" hidden {facts}>{radios}{slider}</label></form>'


def draw_axes(x_axis: Axis, y_axis: Axis, x_title: str, y_title: str = "") -> list[str]:
    """Return the shapes of both axes; the x axis has its own group, which `SCRIPT_FILE` redraws."""
    left, right, bottom, shapes = x_axis.start, x_axis.stop, y_axis.start, list[str]()
    for tick in y_axis.ticks:
        y, label = y_axis.place(tick), escape(y_axis.label(tick))
        shapes.append(f'<path class="grid" d="M{left} {y:.1f}H{right}"/>')
        shapes.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    if y_title:
        place = f"translate(14 {(bottom + y_axis.stop) / 2:.1f}) rotate(-90)"
        shapes.append(f'<text transform="{place}" text-anchor="middle">{y_title}</text>')
    shapes += [f'<path class="axis" d="M{left} {bottom}H{right}"/>', '<g class="x">']
    for tick in x_axis.ticks:
        x, label = x_axis.place(tick), escape(x_axis.label(tick))
        shapes.append(f'<path class="axis" d="M{x:.1f} {bottom}v4"/>')
        shapes.append(f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{label}</text>')
    middle = (left + right) / 2
    title = f'<text x="{middle}" y="{bottom + 34}" text-anchor="middle">{x_title}</text>'
    return [*shapes, title, "</g>"]


def _value_axis(name: str, values: Sequence[float]) -> Axis:
    """Return the axis of a metric: ticks are multiples of 1, 2, 2.5 or 5 times a power of ten."""
    low, high = min(values), max(values)
    start, stop = HEIGHT - BOTTOM, TOP
    is_rate, is_memory = name.endswith("_per_s"), name.endswith("_bytes")
    if is_rate or is_memory or name in FROM_ZERO:
        low = 0.0
    is_share = is_fraction(name) and low >= 0 and high <= 1
    if not is_share and is_logarithmic(name, low, high):
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        stride = max(1, round((last - first) / 6))
        ticks = [10.0**power for power in range(first, last + 1, stride)]
        return Axis(10.0**first, 10.0**last, ticks, "{:g}".format, start, stop, is_log=True)
    unit = 1024 ** int(math.log(max(high, 1), 1024)) if is_memory else 1
    low, high = low / unit, high / unit
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        pad = abs(high) * 0.1 or 1.0
        low, high = low - pad, high + pad
    spacing = _nice((high - low) / 5)
    first, last = math.floor(low / spacing + 1e-9), math.ceil(high / spacing - 1e-9)
    ticks = [index * spacing * unit for index in range(first, last + 1)]

    def label(value: float) -> str:
        if is_memory:
            return num_bytes(value)
        if is_rate or spacing >= 1000:
            return short_count(value)
        if spacing < 1e-3 and not is_share:
            return f"{value:.1e}" if abs(value) > spacing / 2 else "0"
        # Use as many decimals as the tick spacing has.
        digits = f"{spacing * (100 if is_share else 1):.12f}".rstrip("0")
        return f"{value:.{len(digits.partition('.')[2])}{'%' if is_share else 'f'}}"

    low, high = ticks[0], ticks[-1]
    if is_share:
        low, high = max(0.0, low), min(1.0, high)
        ticks = [tick for tick in ticks if 0 <= tick <= 1 + 1e-9]
    return Axis(low, high, ticks, label, start, stop)


def _nice(step: float) -> float:
    """Return the smallest number of at least `step` that is 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * (1 - 1e-9))
