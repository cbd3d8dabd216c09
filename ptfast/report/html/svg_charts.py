"""Line charts and stacked bars as inline SVG that follows the page's colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ptfast.core.units import figure, grouped, is_fraction, num_bytes, short_count

Points = Sequence[tuple[float, float]]

SCRIPT_FILE = Path(__file__).with_name("charts.js")
"""Redraws curves as `curve_controls` say."""
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
"""Figures that are called something else than their names."""
FROM_ZERO = ("cpu_cores", "gpu_use")
"""Figures whose axis begins at 0, as that of rates does."""


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    points: Points
    """(x, y), sorted by x, all finite."""
    color: int = 0
    """Place in the page's palette, counted round and round."""

    @property
    def css(self) -> str:
        """Colour class, and a dash where the palette has been used up."""
        return line_color(self.color) + (" dash" if self.color // NUM_COLORS % 2 else "")


@dataclass(frozen=True)
class Axis:
    """An axis: its range, its ticks and their labels."""

    low: float
    high: float
    ticks: Sequence[float]
    label: Callable[[float], str]
    is_log: bool = False

    def place(self, value: float) -> float:
        """The position of `value` between the ends, 0 to 1."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return (value - low) / (high - low)


def line_chart(name: str, series: Sequence[Series], last_step: float, title: str | None = None) -> str:
    """A chart of the figure `name` over the steps from 0 to `last_step`.

    The figure's name decides how its values are written. Positive values over more than a factor of 50 get a
    logarithmic scale, rates such as samples per second start at 0. Long series are thinned to means of
    neighbours.
    """
    thinned = [Series(s.name, thin(s.points), s.color) for s in series if s.points]
    if not thinned:
        return ""
    ys = [y for s in thinned for _, y in s.points]
    x_axis = _step_axis(last_step)
    y_axis = _value_axis(name, ys)
    shapes = [*_frame(y_axis), *_steps(x_axis), *(_line(name, s, x_axis, y_axis) for s in thinned)]
    title = escape((title or figure_title(name)) + (", log scale" if y_axis.is_log else ""))
    legend = "".join(f'<span class="key {s.css}"><i></i>{escape(s.name)}</span>' for s in thinned)
    return (
        f'<figure class="curve{" exact" * (name == "lr")}"><figcaption><b>{title}</b>{legend}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title} by step">'
        f"{''.join(shapes)}</svg></figure>"
    )


def stacked_bar(parts: Sequence[tuple[str, float]], colors: Sequence[str]) -> str:
    """One bar cut in proportion to `parts` (name, value), each in the colour of a CSS class."""
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
    """The class of a line's colour."""
    return f"c{index % NUM_COLORS}"


def thin(
    points: Sequence[tuple[float, float]], max_points: int = MAX_POINTS
) -> Sequence[tuple[float, float]]:
    """At most `max_points` points: each the mean of a run of neighbours, the last point kept as it is."""
    if len(points) <= max_points:
        return points
    size = math.ceil(len(points) / (max_points - 1))
    groups = [points[start : start + size] for start in range(0, len(points) - 1, size)]
    means = [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
    return [*means, points[-1]]


def is_logarithmic(name: str, low: float, high: float) -> bool:
    """Return True if a figure from `low` to `high` is better seen on a logarithmic scale."""
    return name != "lr" and not name.endswith("_per_s") and low > 0 and high / low > 50


def figure_title(name: str) -> str:
    """A figure's name with its unit: `throughput (samples/s)`."""
    if name in TITLES:
        return TITLES[name]
    return name.replace("_", " ")


def curve_controls(last_step: float, knots: Sequence[tuple[float, float, float]]) -> str:
    """Choice of the x axis and of smoothing for the curves of a page, for the script `SCRIPT_FILE`.

    Without a script it stays hidden.

    Args:
        last_step: of the curves.
        knots: (step, epoch, seconds of training), rising, between which the two are linear.
    """
    names = ["step", *["epoch"] * any(knot[1] for knot in knots), *["time"] * any(knot[2] for knot in knots)]
    places = {"step": 0, "epoch": 1, "time": 2}
    radios = "".join(
        f'<label><input type="radio" name="axis" value="{places[name]}"{" checked" * (name == "step")}>'
        f"{name}</label>"
        for name in names
    )
    slider = '<label>smoothing <input type="range" name="smoothing" min="0" max="0.98" step="0.02" value="0">'
    rows = ",".join(f"[{step:.0f},{epoch:.5g},{seconds:.5g}]" for step, epoch, seconds in knots)
    box = f"[{LEFT},{WIDTH - RIGHT},{HEIGHT - BOTTOM}]"
    facts = f'data-box="{box}" data-last="{last_step:.0f}" data-knots="[{rows}]"'
    return f'<form id="controls" hidden {facts}>{radios}{slider}</label></form>'


def _frame(y_axis: Axis) -> list[str]:
    shapes = []
    for tick in y_axis.ticks:
        y = _y(y_axis, tick)
        shapes.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        label = escape(y_axis.label(tick))
        shapes.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    return [*shapes, f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>']


def _steps(x_axis: Axis) -> list[str]:
    """Ticks and title of the x axis, in a group by themselves."""
    bottom = HEIGHT - BOTTOM
    shapes = []
    for tick in x_axis.ticks:
        x = _x(x_axis, tick)
        shapes.append(f'<path class="axis" d="M{x:.1f} {bottom}v4"/>')
        label = escape(x_axis.label(tick))
        shapes.append(f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{label}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    shapes.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    return ['<g class="x">', *shapes, "</g>"]


def _line(name: str, series: Series, x_axis: Axis, y_axis: Axis) -> str:
    places = [(_x(x_axis, x), _y(y_axis, y)) for x, y in series.points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    shapes = [f'<path class="line" d="{path}"/>'] if len(places) > 1 else []
    if len(places) <= MAX_MARKERS:
        for (x, y), (step, value) in zip(places, series.points, strict=True):
            tip = escape(f"{series.name} {figure(name, value)} at {grouped(step)}")
            shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6"><title>{tip}</title></circle>')
    return f'<g class="{series.css}">{"".join(shapes)}</g>'


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.place(value) * (WIDTH - RIGHT - LEFT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.place(value) * (HEIGHT - BOTTOM - TOP)


def _value_axis(name: str, values: Sequence[float]) -> Axis:
    low, high = min(values), max(values)
    if name.endswith("_per_s"):
        return _linear_axis(0.0, high, lambda _: short_count)
    if name.endswith("_bytes"):
        unit = 1024 ** int(math.log(max(high, 1), 1024))
        axis = _linear_axis(0.0, high / unit, _plain_labels)
        return Axis(0.0, axis.high * unit, [tick * unit for tick in axis.ticks], num_bytes)
    if name in FROM_ZERO:
        low = 0.0
    if is_fraction(name) and low >= 0 and high <= 1:
        axis = _linear_axis(low, high, lambda step: lambda v: f"{v:.{_decimals(step * 100)}%}")
        return Axis(
            max(0.0, axis.low), min(1.0, axis.high), [t for t in axis.ticks if 0 <= t <= 1 + 1e-9], axis.label
        )
    if is_logarithmic(name, low, high):
        return _log_axis(low, high)
    return _linear_axis(low, high, _plain_labels)


def _step_axis(last_step: float) -> Axis:
    """Steps from 0, with ticks at whole ones."""
    last_step = max(last_step, 1)
    spacing = max(1, math.ceil(_nice(last_step / 6)))
    return Axis(0, last_step, range(0, int(last_step) + 1, spacing), grouped)


def _linear_axis(low: float, high: float, labels: Callable[[float], Callable[[float], str]]) -> Axis:
    """Ticks at multiples of 1, 2, 2.5 or 5 times a power of ten, the ends among them."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        pad = abs(high) * 0.1 or 1.0
        low, high = low - pad, high + pad
    spacing = _nice((high - low) / 5)
    first, last = math.floor(low / spacing + 1e-9), math.ceil(high / spacing - 1e-9)
    ticks = [index * spacing for index in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], ticks, labels(spacing))


def _log_axis(low: float, high: float) -> Axis:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, round((last - first) / 6))
    ticks = [10.0**power for power in range(first, last + 1, stride)]
    return Axis(10.0**first, 10.0**last, ticks, lambda value: f"{value:g}", is_log=True)


def _nice(step: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is not less than `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * (1 - 1e-9))


def _decimals(spacing: float) -> int:
    """Decimals at which multiples of `spacing` differ."""
    digits = f"{spacing:.12f}".rstrip("0")
    return len(digits.partition(".")[2])


def _plain_labels(step: float) -> Callable[[float], str]:
    if step < 1e-3:
        return lambda value: f"{value:.1e}" if abs(value) > step / 2 else "0"
    if step >= 1000:
        return short_count
    return lambda value: f"{value:.{_decimals(step)}f}"
