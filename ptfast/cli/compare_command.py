"""Runs side by side: a table ranked by one figure, and their curves on one page or picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptfast.config.schema import flatten, with_defaults
from ptfast.core.errors import EXIT_OK, ConfigError, cannot_write, shorten
from ptfast.core.units import TOO_SHORT, better_mode, duration, figure, is_fraction
from ptfast.report.html.html_page import header, html_table, page
from ptfast.report.html.run_files import RunFiles, is_finite, read_run
from ptfast.report.html.run_report import chart_order, headline
from ptfast.report.html.svg_charts import Series, figure_title, is_logarithmic, line_chart, line_color, thin
from ptfast.report.terminal.display import table

SPLITS = ("best", "val", "test", "train")
COLUMNS = {"train_samples_per_s": "samples/s", "peak_memory_bytes": "peak memory", "wall_s": "wall"}
"""Columns beside the figures, by key of summary.json, with their headers."""
NOT_COMPARED = ("run", "sweep", "recipe", "trust")
"""Sections that say where a run lies and how it was started, not what it computes."""

Labels = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Ranking:
    """Runs from best to worst; those without the figure come last, failed ones at the very end."""

    metric: str
    """The figure that ranks them: `val.accuracy`, or a key of summary.json such as `wall_s`."""
    mode: str
    """`max` or `min`: which way it is better."""
    runs: list[RunFiles]
    values: list[float | None]
    """The metric of each run; None where it is missing or does not count because the run failed."""
    headers: list[str]
    rows: list[list[str]]


def compare(
    run_dirs: Sequence[Path], metric: str | None = None, mode: str | None = None, out: Path | None = None
) -> int:
    """Print runs in order and, given `out`, draw their curves over each other; returns the exit code.

    Args:
        run_dirs: run directories.
        metric: `val.accuracy`, `accuracy` (of the best evaluation), `wall_s`, ...; None or `auto` takes
            what the runs' own `best` follows.
        mode: `max` or `min`; None or `auto` judges by the metric's name.
        out: a page (`.html`) or a picture (`.png`).

    Raises:
        ConfigError: C001 when a path is no run directory or `out` is neither of the two, C005 for another
            mode, or when no run has the metric.
        MachineError: E001 when `out` cannot be written.
    """
    for run_dir in run_dirs:
        if not any((run_dir / name).is_file() for name in ("config.yaml", "metrics.jsonl", "summary.json")):
            hint = "Name folders such as runs/<recipe>/<time>"
            raise ConfigError("C001", "is not a run directory", key=str(run_dir), suggestion=hint)
    if out is not None and out.suffix not in (".html", ".png"):
        raise ConfigError("C001", "must end in .html or .png", key="--out", value=out)
    if mode not in (None, "auto", "min", "max"):
        raise ConfigError("C005", "must be min, max or auto", key="--mode", value=mode)
    ranking = rank_runs(run_dirs, metric, mode)
    if all(value is None for value in ranking.values) and metric not in (None, "auto"):
        known = sorted({name for run in ranking.runs for name in _metric_names(run)})
        hint = f"There are: {', '.join(known)}" if known else "None of the runs has figures yet"
        raise ConfigError("C005", "no run has this figure", key="--metric", value=metric, suggestion=hint)
    _print(ranking)
    if out is not None:
        write_comparison(ranking, out)
        print(f"wrote {out}")
    return EXIT_OK


def print_ranking(run_dirs: Sequence[Path], metric: str | None = None, mode: str | None = None) -> Ranking:
    """Print the table that ends a sweep: its runs in order, named by the arguments in which they differ."""
    ranking = rank_runs(run_dirs, metric, mode, is_sweep=True)
    _print(ranking)
    return ranking


def write_comparison(ranking: Ranking, out: Path) -> None:
    """Write the table and the curves as a page, or the curves as a picture where `out` ends in `.png`.

    Raises:
        MachineError: E001 when it cannot be written.
    """
    try:
        if out.suffix == ".png":
            _draw(ranking, out)
        else:
            out.write_text(_render(ranking), encoding="utf-8")
    except OSError as error:
        raise cannot_write(error, str(out)) from error


def rank_runs(
    run_dirs: Sequence[Path], metric: str | None = None, mode: str | None = None, is_sweep: bool = False
) -> Ranking:
    """Order runs by `metric`; nothing that is missing raises.

    Args:
        metric: see `compare`.
        mode: see `compare`.
        is_sweep: name the runs by the arguments in which they differ, not by the whole config.
    """
    runs = [read_run(Path(run_dir)) for run_dir in run_dirs]
    if metric is None or metric == "auto":
        metric = _default_metric(runs)
    if mode is None or mode == "auto":
        mode = better_mode(metric)
    values = [None if run.status == "failed" else _value(run, metric) for run in runs]
    sign = -1.0 if mode == "max" else 1.0

    def place(index: int) -> tuple[bool, bool, float]:
        value = values[index]
        return runs[index].status == "failed", value is None, 0.0 if value is None else sign * value

    order = sorted(range(len(runs)), key=place)
    runs, values = [runs[index] for index in order], [values[index] for index in order]
    labels = _argument_differences(runs) if is_sweep else _config_differences(runs)
    headers, rows = _table(runs, values, metric, labels)
    return Ranking(metric, mode, runs, values, headers, rows)


def _print(ranking: Ranking) -> None:
    better = "highest" if ranking.mode == "max" else "lowest"
    title = f"{len(ranking.runs)} runs by {ranking.metric}, {better} first"
    table(ranking.headers, ranking.rows, title=title)


def _default_metric(runs: Sequence[RunFiles]) -> str:
    for run in runs:
        if followed := run.summary.get("best_metric"):
            return str(followed)
    for split in ("best", "val", "test", "train"):
        for run in runs:
            if name := headline(run.figures(split)):
                return f"{split}.{name}"
    return "best.loss"


def _value(run: RunFiles, metric: str) -> float | None:
    split, dot, name = metric.partition(".")
    if dot:
        candidates = [run.figures(split).get(name)] if split in SPLITS else []
    else:
        candidates = [run.summary.get(metric), *(run.figures(split).get(metric) for split in SPLITS)]
    return next((float(value) for value in candidates if is_finite(value)), None)


def _metric_names(run: RunFiles) -> list[str]:
    names = [f"{split}.{name}" for split in SPLITS for name in run.figures(split) if name != "step"]
    return names + [name for name, value in run.summary.items() if is_finite(value) and name != "exit_code"]


def _table(
    runs: Sequence[RunFiles], values: Sequence[float | None], metric: str, labels: Labels
) -> tuple[list[str], list[list[str]]]:
    keys = list(dict.fromkeys(key for label in labels for key in label))
    loss = f"{metric.partition('.')[0]}.loss" if "." in metric else "best.loss"
    others = [name for name in (loss, *COLUMNS) if name != metric]
    headers = ["#", *keys, metric, *(COLUMNS.get(name, name) for name in others), "status", "run"]
    rows = []
    for index, (run, value, label) in enumerate(zip(runs, values, labels, strict=True)):
        row = ["" if value is None else str(index + 1), *(label.get(key, "-") for key in keys)]
        row += [_shown(run, metric, value), *(_shown(run, name, _value(run, name)) for name in others)]
        error = run.summary.get("error")
        row += [f"{run.status}: {shorten(error, 60)}" if error else run.status, run.run_dir.name]
        rows.append(row)
    return headers, rows


def _shown(run: RunFiles, metric: str, value: float | None) -> str:
    if value is None:
        return TOO_SHORT if metric == "train_samples_per_s" and metric in run.summary else "-"
    name = metric.rpartition(".")[2]
    return duration(value) if name.endswith("_s") and not name.endswith("_per_s") else figure(name, value)


def _argument_differences(runs: Sequence[RunFiles]) -> Labels:
    """The arguments in which runs differ, as they were typed."""
    given = []
    for run in runs:
        words = run.summary.get("arguments") or run.environment.get("command_line") or []
        pairs = [str(word).partition("=") for word in words if "=" in str(word)]
        given.append({key.lstrip("+"): value for key, _, value in pairs})
    keys = [
        key for key in dict.fromkeys(key for words in given for key in words) if not key.startswith("run.")
    ]
    swept = [key for key in keys if len({words.get(key) for words in given if words}) > 1]
    return [{key: shorten(words[key], 30) for key in swept if key in words} for words in given]


def _config_differences(runs: Sequence[RunFiles]) -> Labels:
    """The config keys in which runs differ, with their values.

    Where runs use different targets in a section, the keywords that only some of them know are left out.
    """
    flat = [flatten(with_defaults(run.config)) if run.config else {} for run in runs]
    readable = [config for config in flat if config]
    differing = []
    for key in dict.fromkeys(key for config in readable for key in config):
        if key.split(".")[0] in NOT_COMPARED or len({str(config.get(key)) for config in readable}) == 1:
            continue
        section = key.rpartition(".")[0]
        targets = {str(config.get(f"{section}._target_")) for config in readable}
        if len(targets) == 1 or all(key in config for config in readable):
            differing.append(key)
    return [{_title(key): _short(key, config[key]) for key in differing if key in config} for config in flat]


def _title(key: str) -> str:
    return key.removesuffix("._target_")


def _short(key: str, value: Any) -> str:
    return str(value).rpartition(".")[2] if key.endswith("_target_") else shorten(value, 30)


@dataclass(frozen=True)
class Overlay:
    """One chart: a figure of one split, a line for each run."""

    name: str
    title: str
    series: list[Series]


def _overlays(runs: Sequence[RunFiles], names: Sequence[str]) -> list[Overlay]:
    overlays = []
    for figure_name in chart_order(list(dict.fromkeys(name for run in runs for name in run.curves))):
        for split in ("val", "train"):
            curves = [run.curves.get(figure_name, {}).get(split, []) for run in runs]
            series = [Series(names[i], points, i) for i, points in enumerate(curves) if points]
            if series:
                about_training = figure_name in ("lr", "samples_per_s")
                title = figure_title(figure_name)
                overlays.append(Overlay(figure_name, title if about_training else f"{split} {title}", series))
    return overlays


def _names(ranking: Ranking) -> list[str]:
    """A short name for each run: its rank, or its status where it has none."""
    return [row[0] or run.status for run, row in zip(ranking.runs, ranking.rows, strict=True)]


def _long_names(ranking: Ranking) -> list[str]:
    """Names with the keys in which the runs differ, for a picture that has no table beside it."""
    keys = ranking.headers[1 : ranking.headers.index(ranking.metric)]
    names = []
    for short, run, row in zip(_names(ranking), ranking.runs, ranking.rows, strict=True):
        apart = ", ".join(f"{key}={row[place]}" for place, key in enumerate(keys, start=1))
        names.append(shorten(f"{short}: {apart or run.run_dir.name}", 60))
    return names


def _render(ranking: Ranking) -> str:
    last_step = max((run.last_step for run in ranking.runs), default=0)
    overlays = _overlays(ranking.runs, _names(ranking))
    charts = [line_chart(chart.name, chart.series, last_step, chart.title) for chart in overlays]
    body = header(f"{len(ranking.runs)} runs", None, f"by {ranking.metric}, best first")
    body += html_table(
        ranking.headers, ranking.rows, [line_color(index) for index in range(len(ranking.runs))]
    )
    if charts:
        body += f'<h2>Curves</h2><div class="grid2">{"".join(charts)}</div>'
    return page(f"{len(ranking.runs)} runs by {ranking.metric}", body)


def _draw(ranking: Ranking, out: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    overlays = _overlays(ranking.runs, _long_names(ranking))
    num_rows = max(1, (len(overlays) + 1) // 2)
    picture = Figure(figsize=(11, 3.2 * num_rows + 0.8), layout="constrained")
    lines = {}
    for index, chart in enumerate(overlays):
        axes = picture.add_subplot(num_rows, 2, index + 1)
        for series in chart.series:
            style, color = "--" if series.color // 10 % 2 else "-", f"C{series.color % 10}"
            (lines[series.name],) = axes.plot(
                *zip(*thin(series.points), strict=True), style, color=color, lw=1.4
            )
        values = [value for series in chart.series for _, value in series.points]
        if chart.name.endswith("_per_s"):
            axes.set_ylim(bottom=0)
        elif is_fraction(chart.name):
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        elif is_logarithmic(chart.name, min(values), max(values)):
            axes.set_yscale("log")
        axes.set_title(chart.title, fontsize=11, loc="left")
        axes.set_xlabel("step")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    if lines:
        picture.legend(lines.values(), lines.keys(), loc="outside lower center", fontsize=9, ncols=2)
    picture.savefig(out, dpi=120)
