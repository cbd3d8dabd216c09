"""A curve in characters, for terminals and pipes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

LEAST_WIDTH, LEAST_HEIGHT = 20, 5


def chart(
    xs: Sequence[float],
    ys: Sequence[float],
    *,
    width: int = 72,
    height: int = 14,
    marks: Mapping[str, float] | None = None,
    x_label: str = "",
    plain: bool = False,
) -> list[str]:
    """Lines that draw `ys` over the logarithm of `xs`.

    Args:
        xs: rising, > 0.
        ys: finite.
        width, height: of the whole in characters and lines; less than 20 by 5 is taken for that.
        marks: a letter for a place on the x axis, drawn beneath it.
        x_label: what x is.
        plain: draw with ASCII alone.
    """
    low, high = min(ys), max(ys)
    labels = [f"{high:.4g}", f"{low:.4g}"]
    margin = max(map(len, labels)) + 1
    columns = max(width, LEAST_WIDTH) - margin - 1
    rows = max(height, LEAST_HEIGHT) - 3
    first, last = math.log(xs[0]), math.log(xs[-1])

    def column(x: float) -> int:
        share = (math.log(x) - first) / (last - first) if last > first else 0.0
        return min(max(round(share * (columns - 1)), 0), columns - 1)

    dot, bar, corner, line = ("*", "|", "+", "-") if plain else ("•", "│", "└", "─")
    canvas = [[" "] * columns for _ in range(rows)]
    for x, y in zip(xs, ys, strict=True):
        share = (high - y) / (high - low) if high > low else 0.5
        canvas[round(share * (rows - 1))][column(x)] = dot
    sides = [labels[0], *[""] * (rows - 2), labels[1]]
    lines = [
        f"{side:>{margin}}{bar}{''.join(cells)}".rstrip() for side, cells in zip(sides, canvas, strict=True)
    ]
    lines.append(" " * margin + corner + line * columns)
    letters = [" "] * columns
    for letter, x in (marks or {}).items():
        letters[column(x)] = letter
    if marks:
        lines.append(" " * (margin + 1) + "".join(letters).rstrip())
    left, right = f"{xs[0]:.0e}", f"{xs[-1]:.0e}"
    room = columns - len(left) - len(right)
    lines.append(" " * (margin + 1) + left + x_label.center(room)[:room] + right)
    return lines
