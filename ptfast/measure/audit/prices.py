"""The price of a finding, by paired trials: of what mends it in this process, or of a config in others."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ptfast.measure.audit.finding import Finding, Price, Trial
from ptfast.measure.trials.comparison import ORDER, Arm, Comparison
from ptfast.measure.trials.session import Session
from ptfast.measure.trials.verdicts import LEAST_ROUNDS, Effect, Word, estimate, judge

STRETCH_S = 0.1
"""Least time of a stretch, next to which what begins and ends it counts for nothing."""
SHARE = 0.2
"""Largest part of the budget that one finding in this process may take."""
MOST_ROUNDS = 20


OnTrial = Callable[[str, float], AbstractContextManager[None]]
"""Called with the name of what is measured next and the seconds that are left at most; open while it is."""


def _silent(what: str, left_s: float) -> AbstractContextManager[None]:
    return nullcontext()


def price_here(
    findings: list[Finding], budget_s: float, device_type: str, on_trial: OnTrial = _silent
) -> None:
    """Measure in this process what findings with a trial cost, and put the prices into `findings`.

    Both sides of a trial have the same process with its memory and threads, so that no A/A run is needed.
    """
    tried = [number for number, finding in enumerate(findings) if finding.trial is not None]
    seconds = budget_s * min(SHARE, 1 / max(len(tried), 1))
    results: list[tuple[Effect | None, float]] = []
    for position, number in enumerate(tried):
        with on_trial(findings[number].check, seconds * (len(tried) - position)):
            results.append(_measure(findings[number].trial, seconds, device_type))
        _put(findings, tried, results, judge([effect for effect, _ in results]))


def price_by_override(
    findings: list[Finding],
    arguments: Sequence[str],
    budget_s: float,
    folder: Path,
    on_trial: OnTrial = _silent,
) -> dict[str, Any]:
    """Measure in other processes what overrides gain, put the prices into `findings`, return the receipt.

    Raises:
        ConfigError: C005 for a budget that is too small for that.
        PtfastError, ReportedError: whatever stops the run.
    """
    tried = [n for n, finding in enumerate(findings) if finding.overrides and not finding.handled]
    base = Arm("as it is")
    with Session(arguments, budget_s=budget_s, folder=folder) as session:
        with on_trial("the noise", session.left_s):
            session.calibrate(base)
        for position, number in enumerate(tried):
            other = Arm(findings[number].check, findings[number].overrides)
            with on_trial(" ".join(other.overrides), session.left_s):
                session.compare(base, other, seconds=session.left_s / (len(tried) - position))
            results = [(each.effect, _step_s(each)) for each in session.comparisons]
            _put(findings, tried, results, [each.verdict for each in session.comparisons])
        return session.receipt()


def _step_s(comparison: Comparison) -> float:
    """Seconds of a step of the base; 0 where nothing was measured."""
    return comparison.median(0, "wall_s") / comparison.median(0, "steps") if comparison.rounds else 0.0


def _put(
    findings: list[Finding],
    tried: Sequence[int],
    results: Sequence[tuple[Effect | None, float]],
    verdicts: Sequence[Word],
) -> None:
    """Note what trials have shown so far; each may change the verdicts on those before it."""
    for number, (effect, step_s), verdict in zip(tried, results, verdicts, strict=False):
        if effect is not None:
            findings[number] = replace(findings[number], price=Price.of(effect, step_s, verdict))


def _measure(trial: Trial | None, seconds: float, device_type: str) -> tuple[Effect | None, float]:
    """The effect of a trial, and the seconds of a step that its first side takes."""
    assert trial is not None
    sides = trial()

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
