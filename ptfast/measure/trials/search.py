"""A search among candidates, each measured in a process of its own, the best of them several times."""

from __future__ import annotations

import signal
import statistics
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Generic, TypeVar

from ptfast.config.compose import Composed
from ptfast.config.schema import Config
from ptfast.launch.launcher import resolve_num_ranks
from ptfast.measure.trials.trial_process import OnResult, measure_once
from ptfast.report.terminal.display import build_display

TIE = 0.02
"""Candidates whose rates differ by less are as quick."""
FINALISTS, ROUNDS = 3, 3
"""The best so many are measured so many times, in turns."""
Candidate = TypeVar("Candidate", bound=Hashable)


class Search(Generic[Candidate]):
    """Candidates and their measurements.

    Args:
        folder: for the files of the processes.
        seconds: that a candidate is measured for.
    """

    def __init__(self, composed: Composed, config: Config, folder: Path, seconds: float) -> None:
        self.composed, self.config, self.folder, self.seconds = composed, config, folder, seconds
        self.num_ranks = resolve_num_ranks(config)
        self.seen: dict[Candidate, list[dict[str, Any]]] = {}
        """Results, in the order they came in."""
        self.display = build_display()
        self._num_processes = 0

    def run(
        self, what: str, keywords: dict[str, Any], on_result: OnResult
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Measure in a new process, on as many ranks as the config asks for.

        Returns:
            The results, and the name of the signal that ended the process, if one did: the kernel kills a
            process that it has no memory for.
        """
        self._num_processes += 1
        folder = self.folder / str(self._num_processes)
        num_ranks = None if self.config.parallel.strategy == "single" else self.num_ranks
        results, killed = measure_once(self.composed, folder, num_ranks, what, keywords, on_result)
        return results, None if killed is None else signal.Signals(killed).name

    def median(self, candidate: Candidate, figure: str = "samples_per_s") -> float:
        """The median of a figure over all times that `candidate` was measured."""
        return statistics.median(result[figure] for result in self.seen[candidate])

    def spread(self, candidate: Candidate) -> tuple[float, float]:
        """Least and most samples per second of any window."""
        results = self.seen[candidate]
        return min(result["low"] for result in results), max(result["high"] for result in results)

    def quickest(self) -> list[Candidate]:
        """All candidates, the quickest first."""
        return sorted(self.seen, key=self.median, reverse=True)

    def as_quick(self) -> list[Candidate]:
        """The candidates that are as quick as the quickest."""
        least = (1 - TIE) * max(map(self.median, self.seen))
        return [candidate for candidate in self.seen if self.median(candidate) >= least]
