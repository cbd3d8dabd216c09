"""Rank runs by one metric, and average over seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ptfast.config.schema import flatten, with_defaults
from ptfast.core.errors import shorten
from ptfast.core.units import better_mode
from ptfast.measure.experiment.verdicts import t_quantile
from ptfast.report.html.run_files import RunFiles, is_finite
from ptfast.report.html.run_report import headline

SPLITS = ("best", "val", "test", "train")
NOT_COMPARED = ("run", "sweep", "recipe", "trust")
"""Sections about where a run is stored and how it was started; they do not change its results."""
SEED = "seed"
REPEATS = (SEED, "data.fold")

Label = Mapping[str, str]
"""Values, as text, of the keys that differ between runs."""


@dataclass(frozen=True)
class Ranking:
    """Runs from best to worst; those without the metric come last, failed ones at the very end."""

    metric: str
    """The metric that ranks them: `val.accuracy`, or a key of summary.json such as `wall_s`."""
    mode: str
    """`max` or `min`: which direction is better."""
    runs: list[RunFiles]
    values: list[float | None]
    """The metric of each run; None if it is missing or does not count because the run failed."""
    labels: list[Label]
    """The settings that distinguish each run from the others."""

    @property
    def keys(self) -> list[str]:
        return list(dict.fromkeys(key for label in self.labels for key in label))

    @property
    def repeats(self) -> str:
        """What repeats its variants: `seeds`, `folds`, both, or an empty string."""
        return " and ".join(f"{key.rpartition('.')[2]}s" for key in REPEATS if key in self.keys)

    def variants(self, repeats: Sequence[str]) -> list[Variant]:
        """Return the runs grouped by their settings other than `repeats`."""
        found: dict[tuple[tuple[str, str], ...], Variant] = {}
        for run, value, label in zip(self.runs, self.values, self.labels, strict=True):
            own = {key: text for key, text in label.items() if key not in repeats}
            variant = found.setdefault(tuple(own.items()), Variant(own, [], []))
            variant.runs.append(run)
            if value is not None:
                variant.values.append(value)
        return [*found.values()]

    @property
    def loss(self) -> str:
        """The loss on the split that ranks the runs."""
        split, dot, _ = self.metric.partition(".")
        return f"{split if dot else 'best'}.loss"


@dataclass(frozen=True)
class Variant:
    """Runs that differ only in `REPEATS`."""

    label: Label
    runs: list[RunFiles]
    values: list[float]
    """The metric of each run that has one."""

    @property
    def average(self) -> float | None:
        """The mean of the metric; None if no run has it."""
        return statistics.fmean(self.values) if self.values else None

    def spread(self, repeats: str) -> float | None:
        """Return half the 95 % interval of a mean over seeds (Student's t), or else the standard deviation.

        The mean over folds has no such interval, because folds share data. None for fewer than two values.
        """
        if (count := len(self.values)) < 2:
            return None
        std = statistics.stdev(self.values)
        return t_quantile(0.975, count - 1) * std / count**0.5 if repeats == "seeds" else std


def rank_runs(run_dirs: Sequence[Path], metric: str = "auto", mode: str = "auto") -> Ranking:
    """Order runs by `metric`; runs without it come last. Jobs of a sweep are named by their arguments.

    Args:
        metric: `val.accuracy`, `accuracy` (of the best evaluation), `wall_s`, ..., or `auto` for the metric
            that the runs' own `best` follows.
        mode: `max`, `min`, or `auto` to judge by the metric's name.
    """
    runs = [RunFiles(Path(run_dir)) for run_dir in run_dirs]
    if metric == "auto":
        followed = (run.summary.get("best_metric") for run in runs)
        logged = (
            f"{split}.{name}" for split in SPLITS for run in runs if (name := headline(run.metrics(split)))
        )
        metric = str(next(filter(None, followed), None) or next(logged, "best.loss"))
    if mode == "auto":
        mode = better_mode(metric)
    values = [None if run.status == "failed" else metric_of(run, metric) for run in runs]
    parents = {run.run_dir.absolute().parent for run in runs}
    is_sweep = len(parents) == 1 and parents.pop().parent.name == "sweeps"
    labels = _argument_differences(runs) if is_sweep else _config_differences(runs)
    order = sorted(range(len(runs)), key=lambda i: (runs[i].status == "failed", *_sort_key(values[i], mode)))
    return Ranking(
        metric, mode, [runs[i] for i in order], [values[i] for i in order], [labels[i] for i in order]
    )


def group_repeats(ranking: Ranking) -> list[Variant]:
    """Return the variants, best first, if at least one has several seeds or folds; otherwise return []."""
    if not ranking.repeats:
        return []
    variants = ranking.variants(REPEATS)
    if all(len(variant.runs) == 1 for variant in variants):
        return []
    return sorted(variants, key=lambda variant: _sort_key(variant.average, ranking.mode))


def metric_of(run: RunFiles, metric: str) -> float | None:
    """Return a run's metric by its name with or without a split, or by a key of summary.json."""
    split, dot, name = metric.partition(".")
    if dot:
        candidates = [run.metrics(split).get(name)]
    else:
        candidates = [run.summary.get(metric), *(run.metrics(split).get(metric) for split in SPLITS)]
    return next((float(value) for value in candidates if is_finite(value)), None)


def short_labels(labels: Sequence[Label]) -> list[list[str]]:
    """Return each label as `key=value`; keys are shortened to their last word if it is unique."""
    keys = dict.fromkeys(key for label in labels for key in label)
    words = [key.rpartition(".")[2] for key in keys]
    short = {key: word if words.count(word) == 1 else key for key, word in zip(keys, words, strict=True)}
    return [[f"{short[key]}={value}" for key, value in label.items()] for label in labels]


def _sort_key(value: float | None, mode: str) -> tuple[bool, float]:
    if value is None:
        return True, 0.0
    return False, -value if mode == "max" else value


def _argument_differences(runs: Sequence[RunFiles]) -> list[Label]:
    """Return the arguments that differ between runs, as typed."""
    given = []
    for run in runs:
        words = run.summary.get("arguments") or run.environment.get("command_line") or []
        pairs = [str(word).partition("=") for word in words if "=" in str(word)]
        given.append({key.lstrip("+"): value for key, _, value in pairs})
    keys = dict.fromkeys(key for words in given for key in words if not key.startswith("run."))
    swept = [key for key in keys if len({words.get(key) for words in given if words}) > 1]
    return [{key: shorten(words[key], 30) for key in swept if key in words} for words in given]


def _config_differences(runs: Sequence[RunFiles]) -> list[Label]:
    """Return the config keys that differ between runs, except keywords of only some of their targets."""
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
    labels: list[Label] = []
    for config in flat:
        label = {}
        for key in (key for key in differing if key in config):
            value, text = config[key], shorten(config[key], 30)
            if value is None or isinstance(value, bool):
                text = json.dumps(value)
            elif key.endswith("_target_"):
                text = str(value).rpartition(".")[2]
            label[key.removesuffix("._target_")] = text
        labels.append(label)
    return labels
