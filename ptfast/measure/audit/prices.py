"""The price of a finding, by paired trials: of what mends it in this process, or of a config in others."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ptfast.measure.audit.finding import Finding, Price, Trial
from ptfast.measure.trials.comparison import ORDER, Arm
from ptfast.measure.trials.session import Session
from ptfast.measure.trials.verdicts import LEAST_ROUNDS, Effect, estimate, judge

STRETCH_S = 0.1
"""Least time of a stretch, next to which what begins and ends it counts for nothing."""
SHARE = 0.2
"""Largest part of the budget that one finding in this process may take."""
MOST_ROUNDS = 20


def price_here(findings: Sequence[Finding], budget_s: float, device_type: str) -> list[Finding]:
    """Measure in this process what findings with a trial cost, and return all of them.

    Both sides of a trial have the same process with its memory and threads, so that no A/A run is needed.
    """
    tried = [number for number, finding in enumerate(findings) if finding.trial is not None]
    seconds = budget_s * min(SHARE, 1 / max(len(tried), 1))
    results = [_measure(findings[number].trial, seconds, device_type) for number in tried]
    priced = list(findings)
    for number, (effect, cost_s), verdict in zip(tried, results, judge([e for e, _ in results]), strict=True):
        if effect is not None:
            priced[number] = replace(priced[number], price=Price.of(effect, cost_s, verdict))
    return priced


def price_by_override(
    findings: Sequence[Finding], arguments: Sequence[str], budget_s: float, folder: Path
) -> list[Finding]:
    """Measure in other processes what the overrides of findings gain, and return all findings.

    Raises:
        ConfigError: C005 for a budget that is too small for that.
        PtfastError, ReportedError: whatever stops the run.
    """
    tried = [n for n, finding in enumerate(findings) if finding.overrides and not finding.handled]
    priced = list(findings)
    if not tried:
        return priced
    base = Arm("as it is")
    with Session(arguments, budget_s=budget_s, folder=folder) as session:
        session.calibrate(base)
        for position, number in enumerate(tried):
            other = Arm(findings[number].check, findings[number].overrides)
            session.compare(base, other, seconds=session.left_s / (len(tried) - position))
        for number, comparison in zip(tried, session.comparisons, strict=True):
            if (effect := comparison.effect) is not None:
                step_s = comparison.median(0, "wall_s") / comparison.median(0, "steps")
                priced[number] = replace(priced[number], price=Price.of(effect, step_s, comparison.verdict))
    return priced


def _measure(trial: Trial | None, seconds: float, device_type: str) -> tuple[Effect | None, float]:
    """The effect of a trial, and the seconds of a step that its first side takes."""
    assert trial is not None
    sides = trial.make()

    def stretch(side: Callable[[], object], count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            side()
        if device_type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    end = time.perf_counter() + seconds
    for side in sides:
        stretch(side, 1)
    count = max(1, math.ceil(STRETCH_S / max(*(stretch(side, 1) for side in sides), 1e-6)))
    rounds: list[list[float]] = []
    while len(rounds) < LEAST_ROUNDS or (len(rounds) < MOST_ROUNDS and time.perf_counter() < end):
        if len(rounds) < LEAST_ROUNDS and time.perf_counter() > end + seconds:
            return None, 0.0
        rounds.append([stretch(sides[side], count) for side in ORDER])
    ratios = [(math.log(a) + math.log(d) - math.log(b) - math.log(c)) / 2 for a, b, c, d in rounds]
    return estimate(ratios), statistics.median((a + d) / 2 for a, _, _, d in rounds)
