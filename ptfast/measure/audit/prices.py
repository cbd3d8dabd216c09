"""The price of a finding, by paired trials: of what mends it in this process, or of a config in others."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from ptfast.config.overrides import merge
from ptfast.measure.audit.finding import Finding, Price, Trial
from ptfast.measure.experiment.laboratory import Laboratory
from ptfast.measure.experiment.pairs import Pair, judge_pairs, measure_pairs
from ptfast.measure.experiment.verdicts import LEAST_ROUNDS, Effect, Verdict, estimate, judge

ORDER = (0, 1, 1, 0)
"""The sides of a round, in the order they are measured: what drifts evenly weighs on both alike."""
STRETCH_S = 0.1
"""Least time of a segment, next to which what begins and ends it counts for nothing."""
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
    findings: list[Finding], arguments: Sequence[str], budget_s: float, on_trial: OnTrial = _silent
) -> dict[str, Any]:
    """Measure in other processes what overrides gain, put the prices into `findings`, return the receipt."""
    tried = [n for n, finding in enumerate(findings) if finding.overrides and not finding.handled]
    pairs = [Pair(findings[n].check, list(arguments), merge(arguments, findings[n].overrides)) for n in tried]
    with (
        Laboratory(budget_s=budget_s) as laboratory,
        on_trial("what overrides gain", budget_s),
    ):
        measure_pairs(laboratory, pairs)
    effects, verdicts = judge_pairs(pairs)
    results = [
        (effect, pair.median("step_s") if pair.blocks else 0.0)
        for pair, effect in zip(pairs, effects, strict=True)
    ]
    _put(findings, tried, results, verdicts)
    receipts = [
        pair.receipt(effect, verdict) for pair, effect, verdict in zip(pairs, effects, verdicts, strict=True)
    ]
    return {"budget_s": budget_s, "comparisons": receipts}


def _put(
    findings: list[Finding],
    tried: Sequence[int],
    results: Sequence[tuple[Effect | None, float]],
    verdicts: Sequence[Verdict],
) -> None:
    """Note what trials have shown so far; each may change the verdicts on those before it."""
    for number, (effect, step_s), verdict in zip(tried, results, verdicts, strict=False):
        if effect is not None:
            findings[number] = replace(findings[number], price=Price.of(effect, step_s, verdict))


def _measure(trial: Trial | None, seconds: float, device_type: str) -> tuple[Effect | None, float]:
    """The effect of a trial, and the seconds of a step that its first side takes."""
    assert trial is not None
    sides = trial()

    def segment(side: Callable[[], object], count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            side()
        if device_type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    end = time.perf_counter() + seconds
    for side in sides:
        segment(side, 1)
    count = max(1, math.ceil(STRETCH_S / max(*(segment(side, 1) for side in sides), 1e-6)))
    rounds: list[list[float]] = []
    while len(rounds) < LEAST_ROUNDS or (len(rounds) < MOST_ROUNDS and time.perf_counter() < end):
        if len(rounds) < LEAST_ROUNDS and time.perf_counter() > end + seconds:
            return None, 0.0
        rounds.append([segment(sides[side], count) for side in ORDER])
    ratios = [(math.log(a) + math.log(d) - math.log(b) - math.log(c)) / 2 for a, b, c, d in rounds]
    return estimate(ratios), statistics.median((a + d) / 2 for a, _, _, d in rounds)
