"""Human-readable formats of numbers: counts, seconds, bytes and metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

TOO_SHORT = "too short"
"""The text in place of the throughput of a run that was too short to measure."""
NUMBER = re.compile(
    r"[-+]?\d[\d,.]*(e[-+]?\d+)?( ?(%|x|k|M|B|T|[KMGT]iB|s|m \d\ds|h \d\dm|d \d\dh))?|[-+]?(nan|inf)|-|"
    + TOO_SHORT
)
"""Pattern of numbers in a table: with a unit, or a placeholder for a missing number."""

FRACTIONS = ("accuracy", "precision", "recall", "f1", "use")
"""Metrics in [0, 1] that are shown as a percentage, also as the last word of a longer name."""

LOWER_IS_BETTER = ("loss", "perplexity", "bits", "error", "mae", "mse", "rmse", "bytes", "s", "padding")
"""Words in the names of metrics that are better when lower, except rates (`samples_per_s`)."""


def better_mode(metric: str) -> str:
    """Return the direction in which a metric of this name is better: `min` or `max`."""
    words = re.split(r"[._/]", metric)
    is_lower = any(word in LOWER_IS_BETTER or word.endswith(("loss", "error")) for word in words)
    return "min" if is_lower and not metric.endswith("_per_s") else "max"


def grouped(number: float) -> str:
    """Format a number, rounded to an integer, with thousands separators: `3,412`."""
    return f"{number:,.0f}" if math.isfinite(number) else str(number)


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: `1 graph`, `2 graphs`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def short_count(number: float) -> str:
    """Format a count in three digits: `272k`, `1.2M`."""
    if not math.isfinite(number):
        return str(number)
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # 999,500 would round to 1000k: take the larger unit already there.
        if abs(number) >= factor * 0.9995:
            scaled = number / factor
            digits = 1 if abs(scaled) < 9.95 else 0
            return f"{scaled:.{digits}f}".removesuffix(".0") + suffix
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Format a duration in its two largest units: `0.42s`, `8.3s`, `1m 12s`, `2h 05m`, `3d 04h`."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 0.995:
        return f"{seconds:.2f}s"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}h {minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d {hours % 24:02d}h"


def short_time(seconds: float) -> str:
    """Format a short time in three digits: `431 ms`, `12.3 ms`, `87 us`."""
    factor, unit = (1, "s") if seconds >= 1 else (1e-3, "ms") if seconds >= 1e-3 else (1e-6, "us")
    return f"{seconds / factor:.3g} {unit}"


def clock(seconds: float) -> str:
    """Format a countdown: `0:21`, `1:02:03`."""
    whole = max(0, math.ceil(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def num_bytes(number: float) -> str:
    """Format a size in memory or on disk, in powers of 1024: `412 MiB`."""
    size, unit = float(number), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 999.5:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}" if size < 9.95 and unit != "B" else f"{size:.0f} {unit}"


def is_fraction(name: str) -> bool:
    """Return True if a metric of this name is shown as a percentage."""
    return name.replace("/", "_").replace(".", "_").split("_")[-1] in FRACTIONS


def format_metric(name: str, value: Any) -> str:
    """Format a metric's value by its name, at a nearly constant width."""
    if value is None:
        return "not finite"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return str(value)
    if name == "lr" or name.endswith("_lr"):
        return f"{value:.1e}"
    if name.endswith("_per_s"):
        return grouped(value) if value >= 100 else f"{value:.1f}"
    if name.endswith("_bytes"):
        return num_bytes(value)
    if name.endswith("_s"):
        return duration(value)
    if is_fraction(name) and 0 <= value <= 1:
        return f"{value:.2%}"
    if isinstance(value, int):
        return grouped(value)
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.2e}"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.1f}"


def labelled(name: str, value: Any) -> str:
    """Format a metric with its name or unit: `loss 0.2310`, `3,412 samples/s`."""
    if name.endswith("_per_s"):
        return f"{format_metric(name, value)} {name.removesuffix('_per_s').replace('_', ' ')}/s"
    return f"{name} {format_metric(name, value)}"


def are_numbers(cells: Sequence[str]) -> bool:
    """Return True for a column of numbers, which is right-aligned; cells may be empty."""
    known = [cell for cell in cells if cell not in ("", "-")]
    return bool(known) and all(NUMBER.fullmatch(cell) for cell in known)


def listed(metrics: Mapping[str, Any], weights: str = "") -> str:
    """Format metrics in a row, loss first: `loss 0.0712  accuracy 98.33%`; `weights` is their name."""
    names = sorted(metrics, key=lambda name: name != "loss")
    shown = [labelled(name, metrics[name]) for name in names]
    return "  ".join([*shown, *([f"({weights} weights)"] if weights else [])])
