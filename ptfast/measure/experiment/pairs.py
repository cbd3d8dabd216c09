"""Pairs of configs, held against each other in blocks of four processes, two of each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ptfast.measure.experiment.effects import fit_pairs
from ptfast.measure.experiment.laboratory import Laboratory, Measured
from ptfast.measure.experiment.verdicts import Effect, Verdict, judge

NOT_REACHED = "not reached: give a longer --budget"


@dataclass
class Pair:
    """Two configs.

    Args:
        base, other: arguments of each.
        why: why there is nothing to measure.
    """

    name: str
    base: Sequence[str]
    other: Sequence[str]
    why: str = ""
    blocks: list[list[Measured]] = field(default_factory=list)

    @property
    def times(self) -> list[list[float]]:
        """Logarithms of the time of a sample, block by block."""
        return [[math.nan if each.time is None else each.time for each in block] for block in self.blocks]

    def effect(self) -> Effect | None:
        """What the second gains, by the blocks of this pair alone."""
        return fit_pairs([self.times])[0]

    def median(self, figure: str, of: int = 0) -> float:
        """The median of a figure over the processes of the first config (0) or the second (1)."""
        places = ((0, 3), (1, 2))[of]
        runs = [block[place] for block in self.blocks for place in places]
        return statistics.median(run.facts[figure] for run in runs if figure in run.facts)

    def memory_ratio(self) -> float:
        """How many times the memory that training takes above a built run, the first over the second."""
        taken = [self.median("peak_memory_bytes", of) - self.median("built_bytes", of) for of in (0, 1)]
        return taken[0] / max(taken[1], 1)

    def receipt(self, effect: Effect | None, verdict: Verdict) -> dict[str, Any]:
        """Its figures as plain values."""
        low, high = effect.interval() if effect is not None else (None, None)
        figures = {"speedup": effect and effect.ratio, "low": low, "high": high, "verdict": verdict}
        runs = [[each.receipt() for each in block] for block in self.blocks]
        return {"name": self.name, "why": self.why, **figures, "blocks": runs}


def measure_pairs(
    laboratory: Laboratory, pairs: Sequence[Pair], on_pair: Callable[[Pair], None] = lambda pair: None
) -> None:
    """Measure a block of each pair, then another of each, for as long as the laboratory's budget lasts."""
    while open_pairs := [pair for pair in pairs if not pair.why]:
        for pair in open_pairs:
            if laboratory.left_s < laboratory.block_s:
                for missed in pairs:
                    missed.why = missed.why or ("" if missed.blocks else NOT_REACHED)
                return
            on_pair(pair)
            found = laboratory.measure([pair.base, pair.other, pair.other, pair.base])
            found[0].raise_failure()
            pair.why = next((each.why for each in found if each.why), "")
            if not pair.why:
                pair.blocks.append(found)


def judge_pairs(pairs: Sequence[Pair]) -> tuple[list[Effect | None], list[Verdict]]:
    """Effects and verdicts of pairs of one workload, as a family."""
    effects = fit_pairs([pair.times for pair in pairs])
    words = judge(effects)
    return effects, [
        "not applicable" if pair.why and pair.why != NOT_REACHED else word
        for pair, word in zip(pairs, words, strict=True)
    ]
