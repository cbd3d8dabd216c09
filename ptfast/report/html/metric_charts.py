"""What metrics give besides figures, drawn for report.html: confusion matrices, curves, figures by class."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ptfast.core.units import figure, grouped
from ptfast.report.html.html_page import html_table
from ptfast.report.html.svg_charts import LEFT, Series, thin
from ptfast.report.metric_tables import read_tables

MOST_CELLS = 30
"""Classes of which a confusion matrix is drawn; of more, the pairs that are confused most are listed."""
MOST_PAIRS = 20
MOST_CURVES = 8
SIDE = 270
"""Of a chart with shares on both axes."""
CURVES = {
    "ROC": ("false positive rate", "true positive rate"),
    "PrecisionRecallCurve": ("recall", "precision"),
}
"""Axes of curves, by the end of their metric's name."""


def metric_sections(run_dir: Path) -> str:
    """A section for each split that has such; empty for a run without."""
    return "".join(_section(content) for content in read_tables(run_dir))


def _section(content: dict[str, Any]) -> str:
    names, charts, by_class = content.get("class_names"), [], {}
    for name, metric in content["metrics"].items():
        kind, values = str(metric.get("kind")), metric.get("values")
        axes = next((axes for end, axes in CURVES.items() if kind.endswith(end)), None)
        if axes is not None and isinstance(values, list) and len(values) == 3:
            x, y = (values[0], values[1]) if kind.endswith("ROC") else (values[1], values[0])
            charts.append(_curves(name, x, y, axes, names))
        elif _is_matrix(values):
            charts.append(_confusion(name, values, names))
        elif isinstance(values, list) and all(isinstance(value, (int, float)) for value in values):
            by_class.setdefault(len(values), {})[name] = values
        else:
            charts.append(f"<p>{escape(name)} is kept in metrics/{escape(content['split'])}.json</p>")
    for count, columns in by_class.items():
        headers = ["class" if _fits(names, count) else "", *(name.replace("_", " ") for name in columns)]
        rows = [
            [_named(names, index, count), *(figure(name, column[index]) for name, column in columns.items())]
            for index in range(count)
        ]
        charts.append(html_table(headers, rows))
    title = f"Metrics of {content['split']} at step {grouped(content['step'])}"
    return f'<h2>{escape(title)}</h2><div class="grid2">{"".join(charts)}</div>'


def _is_matrix(values: Any) -> bool:
    """Return True for counts of classes by classes."""
    return (
        isinstance(values, list)
        and len(values) > 1
        and all(isinstance(row, list) and len(row) == len(values) for row in values)
        and all(isinstance(cell, (int, float)) for row in values for cell in row)
    )


def _fits(names: Any, count: int) -> bool:
    return isinstance(names, list) and len(names) == count


def _named(names: Any, index: int, count: int) -> str:
    return str(names[index]) if _fits(names, count) else str(index)


def _confusion(name: str, counts: Sequence[Sequence[float]], names: Any) -> str:
    """True classes in rows, predicted ones in columns; a cell is the darker the more of its row it holds."""
    size = len(counts)
    labels = [_named(names, index, size) for index in range(size)]
    title = escape(name.replace("_", " "))
    caption = f"<figcaption><b>{title}</b>true classes in rows, predicted in columns</figcaption>"
    if size > MOST_CELLS:
        cells = [(count, i, j) for i, row in enumerate(counts) for j, count in enumerate(row)]
        pairs = [(count, i, j) for count, i, j in cells if i != j and count]
        rows = [
            [labels[i], labels[j], _cell(count)] for count, i, j in sorted(pairs, reverse=True)[:MOST_PAIRS]
        ]
        return f"<figure>{caption}{html_table(['true', 'predicted', 'count'], rows)}</figure>"
    lines = ["<th></th>" + "".join(f"<th>{escape(label)}</th>" for label in labels)]
    for label, row in zip(labels, counts, strict=True):
        total = sum(row) or 1
        cells = "".join(f'<td style="--part:{100 * count / total:.0f}%">{_cell(count)}</td>' for count in row)
        lines.append(f"<th>{escape(label)}</th>{cells}")
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<figure>{caption}<div class="matrix"><table>{table}</table></div></figure>'


def _cell(count: float) -> str:
    return grouped(count) if float(count).is_integer() else f"{count:.3g}"


def _curves(name: str, x: Any, y: Any, axes: tuple[str, str], names: Any) -> str:
    """Curves between 0 and 1 on both axes, one for each class, at most eight of them."""
    several = isinstance(y[0], list) if y else False
    xs, ys = (x, y) if several else ([x], [y])
    lines = [
        Series(_named(names, index, len(ys)) if several else name, _points(*points), index)
        for index, points in enumerate(list(zip(xs, ys, strict=True))[:MOST_CURVES])
    ]
    shapes = [
        f'<path class="grid" d="M{_x(at):.1f} {_y(0):.1f}V{_y(1):.1f}M{_x(0):.1f} {_y(at):.1f}H{_x(1):.1f}"/>'
        f'<text x="{_x(at):.1f}" y="{_y(0) + 17:.1f}" text-anchor="middle">{at:g}</text>'
        f'<text x="{_x(0) - 8:.1f}" y="{_y(at) + 4:.1f}" text-anchor="end">{at:g}</text>'
        for at in (0, 0.25, 0.5, 0.75, 1)
    ]
    for line in lines:
        path = "L".join(f"{_x(x):.1f} {_y(y):.1f}" for x, y in line.points)
        shapes.append(f'<g class="{line.css}"><path class="line" d="M{path}"/></g>')
    shapes.append(
        f'<text x="{_x(0.5):.1f}" y="{_y(0) + 36:.1f}" text-anchor="middle">{axes[0]}</text>'
        f'<text transform="translate(14 {_y(0.5):.1f}) rotate(-90)" text-anchor="middle">{axes[1]}</text>'
    )
    legend = "".join(
        f'<span class="key {line.css}"><i></i>{escape(line.name)}</span>' for line in lines if several
    )
    left_out = len(ys) - len(lines)
    note = f'<span class="key">and {left_out} more classes</span>' if left_out else ""
    title = escape(name.replace("_", " "))
    return (
        f"<figure><figcaption><b>{title}</b>{legend}{note}</figcaption>"
        f'<svg class="square" viewBox="0 0 {LEFT + SIDE + 16} {SIDE + 58}" role="img" aria-label="{title}">'
        f"{''.join(shapes)}</svg></figure>"
    )


def _points(x: Sequence[Any], y: Sequence[Any]) -> Sequence[tuple[float, float]]:
    numbers = [(a, b) for a, b in zip(x, y, strict=False) if a is not None and b is not None]
    return thin(sorted(numbers)) or [(0.0, 0.0)]


def _x(share: float) -> float:
    return LEFT + share * SIDE


def _y(share: float) -> float:
    return 10 + (1 - share) * SIDE
