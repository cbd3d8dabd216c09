"""The files of a run; missing or damaged files read as empty."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from ptfast.config.files.yaml_file import read_yaml
from ptfast.core.errors import PtfastError
from ptfast.core.run_directory import CONFIG, ENVIRONMENT, EXAMPLES, SUMMARY
from ptfast.core.run_records import Environment, Examples, Summary, read_known
from ptfast.report.loggers import METRICS_FILE, POSITION, RESOURCES, USAGE, Record, read_records

Points = list[tuple[float, float]]


class RunFiles:
    """The content of a run's metrics.jsonl, summary.json, examples.json, config.yaml and environment.json."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.name = "/".join(run_dir.absolute().parts[-2:])
        """The last two parts of the path: `resnet_digits/20261120-101112-ab12`."""
        self.records = read_records(run_dir / METRICS_FILE)
        steps = (record.get("step") for record in self.records)
        self.last_step: float = max(filter(is_finite, steps), default=0)
        self.summary = read_known(run_dir / SUMMARY, Summary)
        self.environment = read_known(run_dir / ENVIRONMENT, Environment)
        self.examples = read_known(run_dir / EXAMPLES, Examples)
        self.status = str(self.summary.get("status") or "unfinished")
        """`finished`, `failed`, ...; `unfinished` for a run without a summary."""
        self.config_text = ""
        with contextlib.suppress(OSError):
            self.config_text = (run_dir / CONFIG).read_text(encoding="utf-8", errors="replace")

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config as plain values; empty if config.yaml cannot be read."""
        with contextlib.suppress(PtfastError):
            return read_yaml(self.run_dir / CONFIG).data
        return {}

    @cached_property
    def curves(self) -> dict[str, dict[str, Points]]:
        """Points (step, value) by metric and split, without non-finite values."""
        hidden = {*POSITION, *RESOURCES} - {*USAGE}
        curves: dict[str, dict[str, Points]] = {}
        for record in self.records:
            step, split = record.get("step"), str(record.get("split", "train"))
            for name, value in record.items():
                if name not in hidden and is_finite(value) and is_finite(step):
                    curves.setdefault(name, {}).setdefault(split, []).append((step, value))
        for splits in curves.values():
            for points in splits.values():
                points.sort(key=lambda point: point[0])
        return curves

    def metrics(self, split: str) -> dict[str, Any]:
        """Return metrics of `best`, a split or an evaluation set, from the summary or the last record."""
        in_summary = {**self.summary, **self.summary.get("evals", {})}.get(split)
        if isinstance(in_summary, dict) and in_summary:
            return in_summary
        latest = next((r for r in reversed(self.records) if r.get("split") == split), {})
        return {name: value for name, value in latest.items() if name not in (*POSITION, *RESOURCES)}


def training_times(records: Sequence[Record]) -> dict[int, float]:
    """Return the seconds of training up to step 0 and each logged step, from the step times of each segment.

    Evaluation, saving and start-up are excluded; untimed first steps count with the median step time.
    """
    windows = [r for r in records if r.get("split") == "train" and is_finite(r.get("step"))]
    known_s = [record["step_s"] for record in windows if is_finite(record.get("step_s"))]
    typical_s = statistics.median(known_s) if known_s else 0.0
    seconds: dict[int, float] = {0: 0.0}
    for before, record in pairwise([{"step": 0}, *windows]):
        step_s = record.get("step_s")
        step_s = step_s if is_finite(step_s) else typical_s
        seconds[record["step"]] = seconds[before["step"]] + (record["step"] - before["step"]) * step_s
    return seconds


def is_finite(value: Any) -> TypeGuard[float]:
    """Return True if `value` is a finite number, which can be plotted or ranked."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
