"""The files of a run; one that is missing or damaged reads as empty."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from ptfast.core.run_directory import CONFIG, ENVIRONMENT, SUMMARY, read_json
from ptfast.report.loggers import METRICS_FILE, PLACE, RESOURCES, Record, read_records

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class RunFiles:
    """Content of one run's metrics.jsonl, summary.json, config.yaml and environment.json."""

    run_dir: Path
    records: list[Record] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""

    @property
    def name(self) -> str:
        """The last two parts of the path: `resnet_digits/20261120-101112-ab12`."""
        return "/".join(self.run_dir.absolute().parts[-2:])

    @property
    def status(self) -> str:
        """`finished`, `failed`, ...; `unfinished` for a run without a summary."""
        return str(self.summary.get("status") or "unfinished")

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.yaml as plain values; empty where it cannot be read."""
        import yaml

        with contextlib.suppress(yaml.YAMLError):
            config = yaml.load(self.config_text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
            if isinstance(config, dict):
                return config
        return {}

    @cached_property
    def curves(self) -> dict[str, dict[str, Points]]:
        """Points (step, value) by figure and split; what is not finite is left out."""
        curves: dict[str, dict[str, Points]] = {}
        for record in self.records:
            step, split = record.get("step"), str(record.get("split", "train"))
            for name, value in record.items():
                if name not in (*PLACE, *RESOURCES) and is_finite(value) and is_finite(step):
                    curves.setdefault(name, {}).setdefault(split, []).append((step, value))
        for splits in curves.values():
            for points in splits.values():
                points.sort(key=lambda point: point[0])
        return curves

    @property
    def last_step(self) -> float:
        """The last step that was logged."""
        return max((step for record in self.records if is_finite(step := record.get("step"))), default=0)

    def figures(self, split: str) -> dict[str, Any]:
        """Figures of `train`, `val`, `test` or `best`: the summary's, or else the last ones logged."""
        in_summary = self.summary.get(split)
        if isinstance(in_summary, dict) and in_summary:
            return in_summary
        latest = next((r for r in reversed(self.records) if r.get("split") == split), {})
        return {name: value for name, value in latest.items() if name not in (*PLACE, *RESOURCES)}


def read_run(run_dir: Path) -> RunFiles:
    """Read what there is of a run."""
    return RunFiles(
        run_dir=run_dir,
        records=read_records(run_dir / METRICS_FILE),
        summary=read_json(run_dir / SUMMARY),
        environment=read_json(run_dir / ENVIRONMENT),
        config_text=_read_text(run_dir / CONFIG),
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def is_finite(value: Any) -> TypeGuard[float]:
    """Return True if `value` is a number that can be drawn or ranked."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
