"""The report.html of a run: metrics, curves and time budget on one self-contained page."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from types import NoneType
from typing import Any

from ptfast.core.clock import CAUSES, label
from ptfast.core.plain_display import spike
from ptfast.core.run_directory import METRICS, read_json, write_text
from ptfast.core.run_records import Lines, Tables, checked
from ptfast.core.units import TOO_SHORT, duration, format_metric, grouped, num_bytes
from ptfast.report.goodput import CATEGORIES
from ptfast.report.html.html_page import header, html_table, page
from ptfast.report.html.run_files import Points, RunFiles, is_finite, training_times
from ptfast.report.html.svg_charts import (
    LEFT,
    SCRIPT_FILE,
    Axis,
    Series,
    curve_controls,
    draw_axes,
    line_chart,
    stacked_bar,
    thin,
)
from ptfast.report.loggers import USAGE

REPORT_FILE = "report.html"
CAUSE_COLORS = {
    "start_up": "c7",
    "warm_up": "c7 pale",
    "data": "c1",
    "transfer": "c1 pale",
    "forward": "c0",
    "backward": "c4",
    "gradient_sync": "c3",
    "optimizer": "c2",
    "callbacks": "c2 pale",
    "evaluation": "c6",
    "saving": "c5",
    "logging": "c5 pale",
    "measuring": "c6 pale",
    "closing": "c7 pale",
}
"""Colors by cause, the same in every report, so that reports can be compared side by side."""
CATEGORY_COLORS = ("c0", "c2", "c7", "c7 pale", "c1", "c6", "c5", "rest")
SPLITS = ("train", "val", "test", "best")
MOST_CLASSES, MOST_KNOTS = 20, 200
MOST_CELLS, MOST_PAIRS, MOST_CURVES = 50, 20, 8
"""A confusion matrix with more than `MOST_CELLS` classes lists only the most confused pairs."""
SIDE = 270
"""Side length in pixels of charts such as ROC curves."""
CURVES = {
    "ROC": ("false positive rate", "true positive rate"),
    "PrecisionRecallCurve": ("recall", "precision"),
}
"""Axis titles of curves, by the suffix of the metric's class."""


def write_report(run_dir: Path) -> Path:
    """Write report.html from the other files of the run; sections of missing files are omitted."""
    run = RunFiles(run_dir)
    title = str(run.summary.get("recipe") or run.config.get("recipe") or run.name)
    words = [word for word in run.environment.get("command_line", []) if "=" in word]
    changed = [word for word in words if not word.lstrip("+").startswith(("recipe=", "run."))]
    subs = [" · ".join(made_of(run)), f"changed: {' '.join(changed)}" if changed else ""]
    body = [header(title, run.status, *subs, str(run_dir.absolute()), " · ".join(versions_of(run)))]
    if error := run.summary.get("error"):
        body.append(f'<p class="card error">{escape(str(error))}</p>')
    body.append(_tiles(run))
    if spikes := run.summary.get("loss_spikes"):
        found = f"Loss spikes: {spikes['count']}, the largest {spike(spikes['largest'])}."
        body.append(f'<p class="card">{escape(found)}</p>')
    if table := _metric_table(run):
        body += ["<h2>Metrics</h2>", table]
    curves = _curve_section(run)
    # The metrics of `test` come last.
    files = sorted((run_dir / METRICS).glob("*.json"), key=lambda file: file.stem == "test")
    tables = [content for file in files if (content := _checked(Tables, read_json(file)))]
    has_matrix = any(map(_is_matrix, (metric for each in tables for metric in each["metrics"].values())))
    body += [
        curves,
        *map(_metric_section, tables),
        _examples(run, matrix=not has_matrix),
        _time_budget(run),
        _goodput(run),
        _roofline(run),
        _commands(run),
        _settings(run),
    ]
    script = SCRIPT_FILE.read_text() if curves else ""
    path = run_dir / REPORT_FILE
    write_text(path, page(f"{title} ({run.status})", "\n".join(filter(None, body)), script))
    return path


def made_of(run: RunFiles) -> list[str]:
    """Return the model, optimizer, learning rate, precision and batch size of a run."""
    parts = {name: part for name, part in run.config.items() if isinstance(part, dict)}
    keys = (("lr", "optimizer", "lr"), ("precision", "precision", "mode"))
    values = {name: parts.get(group, {}).get(key) for name, group, key in keys}
    values["batch"] = run.config.get("batch_size")
    targets = [str(parts.get(name, {}).get("_target_", "")) for name in ("model", "optimizer")]
    made = [target.rpartition(".")[2] for target in targets if target]
    return made + [f"{name} {value}" for name, value in values.items() if value is not None]


def versions_of(run: RunFiles) -> list[str]:
    """Return the versions, machine and commit of a run."""
    facts = run.environment
    found = [f"{name} {facts[name]}" for name in ("ptfast", "torch", "python") if facts.get(name)]
    found += [str(facts[name]) for name in ("device", "processor") if facts.get(name)]
    found += [f"{facts[name]} {name}" for name in ("threads", "ranks") if facts.get(name, 1) > 1]
    return found + [f"commit {str(commit)[:10]}" for commit in [facts.get("git_commit")] if commit]


def best_point(run: RunFiles, split: str, points: Points) -> Points:
    """Return the point of the best checkpoint on a curve of `split`; empty if another split chose it."""
    followed = run.summary.get("best_metric", "").partition(".")[0]
    return [point for point in points if split == followed and point[0] == run.metrics("best").get("step")]


def _curve_section(run: RunFiles) -> str:
    charts = ""
    for name in chart_order(run.curves):
        # A single test metric is shown in the table instead.
        splits = {k: v for k, v in run.curves[name].items() if k != "test" or len(v) > 1}
        colors = [*dict.fromkeys(("train", "val", "test", *splits))]
        series = [Series(split, points, colors.index(split)) for split, points in splits.items()]
        marked = [point for split, points in splits.items() for point in best_point(run, split, points)]
        charts += line_chart(name, [*series, Series("best", marked, len(SPLITS), radius=5)], run.last_step)
    if not charts:
        return ""
    epochs = {r["step"]: r["epoch"] for r in run.records if is_finite(r.get("epoch"))}
    seconds = sorted(training_times(run.records).items())
    knots = [(step, epochs.get(step, 0.0), s) for step, s in seconds if step]
    knots = knots[:: len(knots) // MOST_KNOTS + 1] + knots[-1:]
    return f'<h2>Curves</h2>{curve_controls(run.last_step, knots)}<div class="grid2">{charts}</div>'


def _commands(run: RunFiles) -> str:
    lines = "\n".join(map(escape, run.summary.get("next", ())))
    return f'<h2>Use the model</h2><pre class="card">{lines}</pre>' if lines else ""


def _tiles(run: RunFiles) -> str:
    summary = run.summary
    shown: list[tuple[str, str]] = []
    for split in ("test", "best", "val"):
        name = headline(run.metrics(split))
        if name is not None:
            followed = "val" if run.metrics("val") else "train"
            label = {"best": f"best {followed}", "val": "last val"}.get(split, split)
            shown.append((f"{label} {name.replace('_', ' ')}", format_metric(name, run.metrics(split)[name])))
    if summary.get("wall_s") is not None:
        shown.append(("wall time", duration(summary["wall_s"])))
    if "train_samples_per_s" in summary:
        rate = summary["train_samples_per_s"]
        shown.append(("samples/s", TOO_SHORT if rate is None else format_metric("samples_per_s", rate)))
    if summary.get("steps") is not None:
        shown.append(("steps", grouped(summary["steps"])))
    if summary.get("peak_memory_bytes"):
        shown.append(("peak memory", num_bytes(summary["peak_memory_bytes"])))
    tiles = (
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in shown
    )
    return f'<div class="tiles">{"".join(tiles)}</div>'


def headline(metrics: Mapping[str, Any]) -> str | None:
    """Return the name of the main metric: the first that is not the loss, or else the loss."""
    names = [name for name in metrics if name != "step" and not name.startswith("raw_")]
    return next((name for name in names if name != "loss"), names[0] if names else None)


def _metric_table(run: RunFiles) -> str:
    splits = (*SPLITS, *run.summary.get("evals", ()))
    shown = {split: run.metrics(split) for split in splits if run.metrics(split)}
    hidden = ("step", "lr", "samples_per_s", "grad_norm", *(n for n in run.metrics("best") if "/" in n))
    names = list(dict.fromkeys(name for metrics in shown.values() for name in metrics if name not in hidden))
    if not names:
        return ""
    names.sort(key=lambda name: name != "loss")
    rows = []
    weights = f", {run.summary['weights']} weights" if "weights" in run.summary else ""
    for split, metrics in shown.items():
        label = f"best (step {grouped(metrics['step'])})" if metrics.get("step") is not None else split
        label += "" if split == "train" else weights
        rows.append(
            [label, *(format_metric(name, metrics[name]) if name in metrics else "" for name in names)]
        )
    return html_table(["", *(name.replace("_", " ") for name in names)], rows)


def chart_order(names: Iterable[str]) -> list[str]:
    """Sort metrics for display: loss, task metrics, training metrics, machine usage."""
    last = {"grad_norm": 1, "lr": 2, "samples_per_s": 3, **dict.fromkeys(USAGE, 4)}
    return sorted(names, key=lambda name: (name != "loss", last.get(name, 0)))


def _examples(run: RunFiles, *, matrix: bool) -> str:
    """Show some held-out predictions, accuracy by class and, with `matrix`, a confusion matrix."""
    facts = run.examples
    classes, samples = facts.get("classes") or [], facts.get("samples") or []
    body = []
    if samples:
        body += [f"<h2>Samples of {escape(str(facts.get('split')))}, mistakes first</h2>"]
        body += [f'<div class="samples">{"".join(map(_sample, samples))}</div>']
    if classes:
        rows = [
            [
                str(row["class"]),
                grouped(row["samples"]),
                f"{row['hits'] / row['samples']:.1%}",
                ", ".join(f"{each['class']} ({grouped(each['samples'])})" for each in row["mistaken"][:2]),
            ]
            for row in classes[:MOST_CLASSES]
        ]
        more = f", the {MOST_CLASSES} least accurate of {grouped(len(classes))}"
        what = f"{grouped(facts.get('num_samples', 0))} samples of {escape(str(facts.get('split')))}"
        body.append(f"<h2>By class: {what}{more * (len(classes) > MOST_CLASSES)}</h2>")
        body.append(html_table(["class", "samples", "accuracy", "mistaken for"], rows))
    if classes and matrix:
        pairs = [(row["class"], row["class"], row["hits"]) for row in classes]
        pairs += [
            (row["class"], each["class"], each["samples"]) for row in classes for each in row["mistaken"]
        ]
        counts = {(target, prediction): count for target, prediction, count in pairs}
        names = sorted(
            {name for pair in counts for name in pair},
            key=lambda name: (str(name).isdigit() and len(str(name)), name),
        )
        rows = [[counts.get((row, column), 0) for column in names] for row in names]
        body.append(_confusion("confusion matrix", rows, names))
    return "".join(body)


def _sample(sample: dict[str, Any]) -> str:
    target, prediction = sample["target"], sample["prediction"]
    is_number = not isinstance(prediction, str)
    words = [
        f"{value:.4g}" if is_finite(value) else format_metric("", value) for value in (target, prediction)
    ]
    sure = f" ({sample['probability']:.0%})" if is_finite(sample.get("probability")) else ""
    verdict = "" if is_number else "hit" if target == prediction else "miss"
    # The file may be untrusted: show only embedded images.
    image = str(sample.get("image", ""))
    shown = f'<img alt="" src="{escape(image)}">' if image.startswith("data:image/") else ""
    text = f"<q>{escape(str(sample['text']))}</q>" if "text" in sample else ""
    told = f"<b>{escape(words[0])}</b><span>predicted {escape(words[1])}{sure}</span>"
    if is_finite(sample.get("pixels")):
        told = f"<b>{sample['pixels']:.1%}</b><span>of the pixels right: image, mask, prediction</span>"
        verdict = ""
    return f'<div class="card sample {verdict}">{shown}{text}<div>{told}</div></div>'


def _time_budget(run: RunFiles) -> str:
    budget = run.summary.get("time_budget")
    if not isinstance(budget, dict):
        return ""
    seconds = {str(name): float(s) for name, s in budget.items() if isinstance(s, (int, float)) and s > 0}
    if not seconds:
        return ""
    causes = sorted(seconds, key=lambda name: CAUSES.index(name) if name in CAUSES else len(CAUSES))
    colors = [CAUSE_COLORS.get(name, "rest") for name in causes]
    return _shares("Where the time went", [(label(name), seconds[name]) for name in causes], colors)


def _goodput(run: RunFiles) -> str:
    """Show the time by category over all attempts, if there were several."""
    if (found := run.summary.get("goodput")) is None or found["attempts"] < 2:
        return ""
    colors: dict[str, str] = dict(zip(CATEGORIES, CATEGORY_COLORS, strict=True))
    spent = {name: float(found["seconds"].get(name) or 0.0) for name in CATEGORIES}
    parts = {name: s for name, s in spent.items() if s}
    title = f"Over all {found['attempts']} attempts"
    return _shares(title, [(label(name), s) for name, s in parts.items()], [colors[name] for name in parts])


def _shares(title: str, parts: Sequence[tuple[str, float]], colors: Sequence[str]) -> str:
    """Return a bar and a table of seconds by name."""
    total_s = sum(s for _, s in parts)
    rows = [[name, duration(s), f"{s / total_s:.1%}"] for name, s in parts]
    rows.append(["all", duration(total_s), ""])
    table = html_table(["cause", "time", "share"], rows, colors)
    return f"<h2>{title}</h2>{stacked_bar(parts, colors)}{table}"


def _roofline(run: RunFiles) -> str:
    """Compare the time of a step with the machine's limits."""
    found = run.summary.get("roofline")
    if not isinstance(found, dict) or not found.get("line"):
        return ""
    body = [f"<h2>Roofline: the machine's limits</h2><p>{escape(str(found['line']))}</p>"]
    step_s, floors, waits = found.get("step_s"), found.get("floors_s"), found.get("waits_s")
    if isinstance(floors, dict) and isinstance(waits, dict) and is_finite(step_s) and step_s > 0:
        named = {f"{name}, lower bound": s for name, s in floors.items()}
        named |= {f"wait for {label(name)}": s for name, s in waits.items() if s}
        rows = [[name, f"{s * 1e3:,.3g} ms", f"{s / step_s:.1%}"] for name, s in named.items()]
        rows.append(["a step took", f"{step_s * 1e3:,.3g} ms", ""])
        body.append(html_table(["", "time", "share"], rows))
    return "".join(body)


def _settings(run: RunFiles) -> str:
    columns = []
    if run.config_text:
        columns.append(
            f'<section><h2>config.yaml</h2><pre class="card tall">{escape(run.config_text)}</pre></section>'
        )
    if run.environment:
        rows = []
        for name, value in run.environment.items():
            parts = value if isinstance(value, list) else [value]
            text = " ".join(map(str, parts))
            if isinstance(value, dict):
                text = ", ".join(f"{key} {item}" for key, item in value.items())
            if value is not None:
                rows.append((name.replace("_", " "), text))
        lines = "".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in rows)
        table = f'<div class="card tall facts"><table>{lines}</table></div>'
        columns.append(f"<section><h2>Environment</h2>{table}</section>")
    return f'<div class="columns">{"".join(columns)}</div>' if columns else ""


def _is_matrix(metric: dict[str, Any]) -> bool:
    """Return True if the values of a metric are a square matrix of numbers, such as a confusion matrix."""
    rows = metric.get("values")
    return (
        isinstance(rows, list)
        and len(rows) > 1
        and all(isinstance(row, list) and len(row) == len(rows) for row in rows)
        and all(isinstance(cell, (int, float)) for row in rows for cell in row)
    )


def _metric_section(content: dict[str, Any]) -> str:
    """Show metrics that are not scalars: confusion matrices, curves, values by class."""
    names, charts, by_class = content.get("class_names"), [], {}
    for name, metric in content["metrics"].items():
        kind, values = str(metric.get("kind")), metric.get("values")
        axes = next((axes for end, axes in CURVES.items() if kind.endswith(end)), None)
        rows = values if isinstance(values, list) else []
        if axes is not None and len(rows) == 3 and _checked(Lines, rows[:2]):
            x, y = (values[0], values[1]) if kind.endswith("ROC") else (values[1], values[0])
            charts.append(_curves(name, x, y, axes, names))
        elif _is_matrix(metric):
            charts.append(_confusion(name, values, names))
        elif isinstance(values, list) and all(isinstance(each, (int, float, NoneType)) for each in values):
            by_class.setdefault(len(values), {})[name] = values
        else:
            charts.append(f"<p>{escape(name)} is kept in metrics/{escape(content['split'])}.json</p>")
    for count, columns in by_class.items():
        cells = [[format_metric(name, value) for value in column] for name, column in columns.items()]
        rows = list(zip(_labels(names, count), *cells, strict=True))
        charts.append(html_table(["class", *(name.replace("_", " ") for name in columns)], rows))
    title = f"Metrics of {content['split']} at step {grouped(content['step'])}"
    return f'<h2>{escape(title)}</h2><div class="grid2">{"".join(charts)}</div>'


def _checked(kind: Any, value: Any) -> Any:
    """Return `value` if it has type `kind`, None otherwise, because the file may be untrusted."""
    with contextlib.suppress(ValueError):
        return checked(kind, json.dumps(value))
    return None


def _labels(names: Any, count: int) -> list[str]:
    """Return the class names, or the class indices if the names are unknown."""
    known = isinstance(names, list) and len(names) == count
    return [str(name) for name in (names if known else range(count))]


def _confusion(name: str, counts: Sequence[Sequence[float]], names: Any) -> str:
    """Show a confusion matrix; darker cells have a larger share of their row."""
    size = len(counts)
    labels = _labels(names, size)
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
    for class_name, row in zip(labels, counts, strict=True):
        total = sum(row) or 1
        cells = "".join(f'<td style="--part:{60 * count / total:.0f}%">{_cell(count)}</td>' for count in row)
        lines.append(f"<th>{escape(class_name)}</th>{cells}")
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<figure>{caption}<div class="matrix"><table>{table}</table></div></figure>'


def _cell(count: float) -> str:
    return "" if not count else grouped(count) if float(count).is_integer() else f"{count:.3g}"


def _curves(name: str, x: Any, y: Any, axes: tuple[str, str], names: Any) -> str:
    """Plot curves between 0 and 1 on both axes, one for each class, eight at most."""
    several = isinstance(y[0], list) if y else False
    xs, ys = (x, y) if several else ([x], [y])
    labels = _labels(names, len(ys)) if several else [name]
    lines = []
    for index, (line_x, line_y) in enumerate([*zip(xs, ys, strict=False)][:MOST_CURVES]):
        known = [(a, b) for a, b in zip(line_x, line_y, strict=False) if a is not None and b is not None]
        points = thin(sorted(known)) or [(0.0, 0.0)]
        lines.append(Series(labels[index], points, index))
    ticks = (0, 0.25, 0.5, 0.75, 1)
    x_axis = Axis(0, 1, ticks, "{:g}".format, LEFT, LEFT + SIDE)
    y_axis = Axis(0, 1, ticks, "{:g}".format, 10 + SIDE, 10)
    shapes = draw_axes(x_axis, y_axis, *axes)
    for line in lines:
        path = "L".join(f"{x_axis.place(x):.1f} {y_axis.place(y):.1f}" for x, y in line.points)
        shapes.append(f'<g class="{line.css}"><path class="line" d="M{path}"/></g>')
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
