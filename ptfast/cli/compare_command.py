"""Compare runs: tables ranked by one metric, and their curves on one page."""

from __future__ import annotations

import os
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from urllib.parse import quote

from ptfast.cli.arguments import write_out
from ptfast.cli.run_ranking import (
    REPEATS,
    SPLITS,
    Ranking,
    Variant,
    group_repeats,
    metric_of,
    rank_runs,
    short_labels,
)
from ptfast.cli.time_to_target import HEADERS, Target, compare_to_target
from ptfast.core.errors import EXIT_OK, ConfigError, shorten
from ptfast.core.units import TOO_SHORT, duration, format_metric
from ptfast.report.html.html_page import header, html_table, page
from ptfast.report.html.run_files import RunFiles, is_finite
from ptfast.report.html.run_report import REPORT_FILE, best_point, chart_order, made_of, versions_of
from ptfast.report.html.svg_charts import Series, chart_title, line_chart, line_color
from ptfast.report.loggers import USAGE
from ptfast.report.terminal.display import fits, table

COLUMNS = {"train_samples_per_s": "samples/s", "peak_memory_bytes": "peak memory", "wall_s": "wall"}
"""Columns other than metrics, by key of summary.json, with their headers."""
LESS_IMPORTANT = ("peak memory", "samples/s", "wall")
"""Columns dropped on a narrow terminal; the loss is dropped after them."""
DEPTH = 3
"""Levels between a named folder and the runs below it: `runs/sweeps/TIME/NUMBER`."""
MOST_NAMES = 8
"""Number of runs whose names fit above a chart."""
RUN_FILES = ("config.yaml", "metrics.jsonl", "summary.json")


def compare(args: Namespace) -> int:
    """Print runs in order, and plot their curves together if a file is named."""
    run_dirs: list[Path] = []
    for word in args.words:
        found = list(_find_runs(Path(word), DEPTH))
        if not found:
            hint = "Name run directories, or a folder of them such as runs/<recipe>"
            raise ConfigError("C001", "contains no run", key=word, suggestion=hint)
        run_dirs += [run_dir for run_dir in found if run_dir not in run_dirs]
    metric, out = args.metric, args.out
    if out is not None and out.suffix != ".html":
        raise ConfigError("C001", "must end in .html", key="--out", value=out)
    ranking = rank_runs(run_dirs, metric, args.mode)
    if all(value is None for value in ranking.values) and metric != "auto":
        metrics = {
            f"{split}.{name}" for run in ranking.runs for split in SPLITS for name in run.metrics(split)
        }
        metrics |= {name for run in ranking.runs for name, value in run.summary.items() if is_finite(value)}
        known = sorted(name for name in metrics - {"exit_code"} if not name.endswith(".step"))
        hint = f"There are: {', '.join(known)}" if known else "No run has any metric yet"
        raise ConfigError("C005", "no run has this metric", key="--metric", value=metric, suggestion=hint)
    target = args.target and Target.parse(args.target)
    show(ranking)
    rows = compare_to_target(ranking, run_dirs, target) if target else []
    if out is not None:
        to_target = f"<h2>To {escape(str(target))}</h2>{html_table(HEADERS, rows)}" if target else ""
        write_out(out, _render(ranking, out.absolute().parent, to_target))
        print(f"wrote {out}")
    return EXIT_OK


def _find_runs(path: Path, depth: int) -> Iterator[Path]:
    """Yield run directories: `path`, or those below it in the order of their names, numbers by size."""
    if any((path / name).is_file() for name in RUN_FILES):
        yield path
    elif depth and path.is_dir():
        below = [child for child in path.iterdir() if child.is_dir() and not child.is_symlink()]
        for child in sorted(below, key=lambda child: (len(child.name), child.name)):
            yield from _find_runs(child, depth - 1)


def show(ranking: Ranking) -> None:
    """Print the variants of a ranking if any has several seeds or folds, then its runs."""
    better = "highest" if ranking.mode == "max" else "lowest"
    if variants := group_repeats(ranking):
        _print(ranking, f"means over {ranking.repeats} by {ranking.metric}, {better} first", variants)
        print()
    links = [_report(run).absolute().as_uri() for run in ranking.runs]
    _print(ranking, f"{len(ranking.runs)} runs by {ranking.metric}, {better} first", links=links)


def _print(ranking: Ranking, title: str, variants: Sequence[Variant] = (), links: Sequence[str] = ()) -> None:
    """Print a table; if it is too wide, drop its less important columns, or join its keys in one column."""
    columns = columns_of(ranking, variants)
    optional = (*LESS_IMPORTANT, ranking.loss if ranking.loss != ranking.metric else "")
    needed = [name for name in columns if name not in optional]
    if not fits([[name, *columns[name]] for name in needed]):
        labels = [variant.label for variant in variants] or ranking.labels
        first = {"#": columns["#"], "differs in": [" ".join(pairs) for pairs in short_labels(labels)]}
        columns = first | {name: cells for name, cells in columns.items() if name not in ranking.keys}
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    table(list(columns), rows, title=title, optional=optional, links=links)


def columns_of(ranking: Ranking, variants: Sequence[Variant] = ()) -> dict[str, list[str]]:
    """Return a table's cells by header: of runs, or of variants by means over those that did not fail."""
    metric, runs = ranking.metric, ranking.runs
    rows = variants or [
        Variant(label, [run], [] if value is None else [value])
        for run, value, label in zip(runs, ranking.values, ranking.labels, strict=True)
    ]
    columns = {"#": [str(place) if row.values else "" for place, row in enumerate(rows, 1)]}
    keys = [key for key in ranking.keys if not variants or key not in REPEATS]
    columns |= {key: [row.label.get(key, "-") for row in rows] for key in keys}
    columns[metric] = [_cell(row.runs[0], metric, row.average) for row in rows]
    if variants:
        spreads = [_cell(runs[0], metric, row.spread(ranking.repeats)) for row in variants]
        columns["±95%" if ranking.repeats == "seeds" else "std"] = spreads
        columns[ranking.repeats] = [str(len(variant.values)) for variant in variants]
    for name in (ranking.loss, *COLUMNS):
        if name == metric:
            continue
        cells = columns[COLUMNS.get(name, name)] = []
        for row in rows:
            counted = [run for run in row.runs if not variants or run.status != "failed"]
            known = [value for run in counted if (value := metric_of(run, name)) is not None]
            cells.append(_cell(row.runs[0], name, fmean(known) if known else None))
    columns["status"] = []
    for row in rows:
        counts = Counter(run.status for run in row.runs)
        several = ", ".join(f"{count} {status}" for status, count in counts.items())
        status = several if len(counts) > 1 else row.runs[0].status
        error = None if variants else row.runs[0].summary.get("error")
        columns["status"].append(f"{status}: {shorten(error, 60)}" if error else status)
    if not variants:
        names = [run.run_dir.name for run in runs]
        columns["run"] = names if len({*names}) == len(names) else [run.name for run in runs]
    return columns


def _cell(run: RunFiles, name: str, value: float | None) -> str:
    """Format a metric, or a mean of it, for a table."""
    if value is None:
        too_short = name == "train_samples_per_s" and name in run.summary
        return TOO_SHORT if too_short else "-"
    name = name.rpartition(".")[2]
    return (
        duration(value) if name.endswith("_s") and not name.endswith("_per_s") else format_metric(name, value)
    )


def _report(run: RunFiles) -> Path:
    """Return the report of a run, or its directory if it has none."""
    report = run.run_dir / REPORT_FILE
    return report if report.is_file() else run.run_dir


def _overlays(ranking: Ranking) -> Iterator[tuple[str, str, list[Series]]]:
    """Yield charts with one line per run, named by its rank or status: metric, title and lines."""
    runs, names = ranking.runs, []
    told_apart = zip(runs, ranking.values, short_labels(ranking.labels), strict=True)
    for place, (run, value, pairs) in enumerate(told_apart, 1):
        rank = run.status if value is None else str(place)
        full = shorten(f"{rank}: {', '.join(pairs) or run.run_dir.name}", 60)
        # The names of many runs would need more room than their curves; the table lists them by number.
        names.append(rank if len(runs) > MOST_NAMES else full)
    known = dict.fromkeys(name for run in runs for name in run.curves if name not in USAGE)
    for metric in chart_order(known):
        for split in ("val", "train"):
            curves = [run.curves.get(metric, {}).get(split, []) for run in runs]
            series = [Series(names[i], points, i) for i, points in enumerate(curves) if points]
            if series:
                marks = (best_point(run, split, points) for run, points in zip(runs, curves, strict=True))
                series += [Series("", marked, i, radius=5) for i, marked in enumerate(marks)]
                about_training = metric in ("lr", "samples_per_s")
                title = chart_title(metric)
                yield metric, title if about_training else f"{split} {title}", series


def _render(ranking: Ranking, folder: Path, to_target: str) -> str:
    """Return the HTML page as stored in `folder`; `to_target` is its time-to-target table."""
    runs = ranking.runs
    facts = [[*made_of(run), *versions_of(run)] for run in runs]
    common = " · ".join(fact for fact in facts[0] if all(fact in other for other in facts))
    order = f"by {ranking.metric}, best first; large dots mark the best checkpoints"
    body = header(f"{len(runs)} runs", None, common, order) + to_target
    if variants := group_repeats(ranking):
        columns = columns_of(ranking, variants)
        means = html_table([*columns], [*zip(*columns.values(), strict=True)])
        body += f"<h2>Means over {ranking.repeats}</h2>{means}<h2>Runs</h2>"
    columns = columns_of(ranking)
    links = [quote(Path(os.path.relpath(_report(run).absolute(), folder)).as_posix()) for run in runs]
    colors = [line_color(index) for index in range(len(runs))]
    body += html_table([*columns], [*zip(*columns.values(), strict=True)], colors, links)
    last_step = max((run.last_step for run in runs), default=0)
    charts = [line_chart(name, series, last_step, title) for name, title, series in _overlays(ranking)]
    if charts:
        body += f'<h2>Curves</h2><div class="grid2">{"".join(charts)}</div>'
    return page(f"{len(runs)} runs by {ranking.metric}", body)
