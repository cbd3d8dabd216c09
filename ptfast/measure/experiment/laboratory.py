"""A session of trials: the warm parent process, the budget left, and blocks measured in turn."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from ptfast.config.files.frozen import redact
from ptfast.core.errors import EXIT_BUG, MachineError, ReportedError
from ptfast.measure.experiment.plan import fit_pairs, turn_means
from ptfast.measure.experiment.trial import end_ranks, start_ranks
from ptfast.measure.experiment.verdicts import Effect, Verdict, judge
from ptfast.measure.experiment.warm_parent import NO_MEMORY, Request, serve

END_S = 5.0
NOT_REACHED = "not reached: give a longer --budget"


@dataclass
class TrialResult:
    """The result of a trial."""

    words: tuple[str, ...]
    time: float | None
    """Logarithm of seconds per token or sample, without the differences between rounds of its block."""
    why: str = ""
    """The reason there is no time."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Of the run: `loss`, `peak_memory_bytes`, `choices`, `times` of each turn, ..."""

    @property
    def gave_out(self) -> bool:
        """Whether memory or time ran out, or the process was killed: such a trial has no error of its own."""
        return bool(self.why) and self.facts.get("code") in (None, NO_MEMORY)

    def raise_failure(self) -> None:
        """Raise the error that ended the trial, if any, as the user's own run would show it."""
        if self.why:
            line = self.facts.get("line") or f"ptfast: error: {self.why}"
            raise ReportedError(line, self.facts.get("exit_code", EXIT_BUG))

    def record(self) -> dict[str, Any]:
        facts = {name: value for name, value in self.facts.items() if name not in ("environment", "choices")}
        return {"words": redact(self.words), "time": self.time, "why": self.why, **facts}


def times_of(block: Sequence[TrialResult]) -> list[float]:
    """Return the times of a block; `nan` for a trial without one."""
    return [math.nan if each.time is None else each.time for each in block]


class Laboratory:
    """Measures blocks of trials within a budget.

    Args:
        budget_s: seconds from now on.
        timed_s, turn_s: seconds for every trial, as in a Request.
    """

    def __init__(self, *, budget_s: float, timed_s: float = 0.7, turn_s: float = 0.05) -> None:
        self.budget_s, self.timed_s, self.turn_s = budget_s, timed_s, turn_s
        self.blocks: list[list[TrialResult]] = []
        self.block_s = 0.0
        """Seconds of the last block."""
        self._start_s = time.monotonic()
        self._process: Any
        self._connection: Connection

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget_s - (time.monotonic() - self._start_s)

    def try_configs(
        self, configs: Sequence[Sequence[str]], *, timed_s: float = 0.0, **options: bool
    ) -> list[TrialResult]:
        """Build each config once and train two steps; then time it for `timed_s` seconds, if any.

        With the option `asks`, the facts of each also have `data`: properties that decide which loaders make
        sense. With `spares`, a config fails unless it evaluates and saves with memory to spare.
        """
        configs, warm_s = [list(words) for words in configs], timed_s / 3
        request = Request(configs, timed_s, self.turn_s, least_turns=2, warm_s=warm_s, **options)
        return self._request(request)

    def measure(self, configs: Sequence[Sequence[str]]) -> list[TrialResult]:
        """Measure a block of configs, a trial each."""
        start_s = time.monotonic()
        request = Request(
            [list(words) for words in configs], self.timed_s, self.turn_s, seed=len(self.blocks)
        )
        found = self._request(request)
        self.block_s = time.monotonic() - start_s
        self.blocks.append(found)
        return found

    def _request(self, request: Request) -> list[TrialResult]:
        try:
            self._connection.send(request)
            answer = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            self.__exit__()
            self.__enter__()
            what = "the process that trials are forked from has ended"
            raise MachineError("E002", what, suggestion="Try a smaller batch_size") from error
        if isinstance(answer, Exception):
            raise answer
        found = [
            TrialResult(tuple(words), None, facts.pop("error", ""), facts)
            for words, facts in zip(request.configs, answer, strict=True)
        ]
        whole = [each for each in found if not each.why and each.facts.get("times")]
        if whole:
            rounds = list(zip(*(each.facts["times"] for each in whole), strict=True))
            for each, mean in zip(whole, turn_means(rounds), strict=True):
                each.time = mean
                each.facts["waiting"] = statistics.fmean(each.facts["waitings"])
        return found

    def __enter__(self) -> Laboratory:
        ((self._process, self._connection),) = start_ranks(serve, 1, "spawn")
        return self

    def __exit__(self, *_: object) -> None:
        # This ends its trials and removes its files.
        self._process.terminate()
        self._process.join(END_S)
        end_ranks([(self._process, self._connection)])


@dataclass
class Pair:
    """Two configs to compare, given by their arguments."""

    name: str
    base: Sequence[str]
    other: Sequence[str]
    why: str = ""
    """The reason there is nothing to measure."""
    blocks: list[list[TrialResult]] = field(default_factory=list)

    def median(self, metric: str, of: int = 0) -> float:
        """Return the median of a metric over the processes of the first config (0) or the second (1)."""
        places = ((0, 3), (1, 2))[of]
        runs = [block[place] for block in self.blocks for place in places]
        return statistics.median(run.facts[metric] for run in runs if metric in run.facts)

    def record(self, effect: Effect | None) -> dict[str, Any]:
        blocks = [[each.record() for each in block] for block in self.blocks]
        return {"name": self.name, "why": self.why, "effect": effect and effect.record(), "blocks": blocks}


def measure_pairs(laboratory: Laboratory, pairs: Sequence[Pair]) -> None:
    """Measure a block of each pair, then another of each, until the laboratory's budget is spent."""
    while open_pairs := [pair for pair in pairs if not pair.why]:
        for pair in open_pairs:
            if laboratory.left_s < laboratory.block_s:
                for missed in pairs:
                    missed.why = missed.why or ("" if missed.blocks else NOT_REACHED)
                return
            found = laboratory.measure([pair.base, pair.other, pair.other, pair.base])
            found[0].raise_failure()
            pair.why = next((each.why for each in found if each.why), "")
            if not pair.why:
                pair.blocks.append(found)


def judge_pairs(pairs: Sequence[Pair]) -> tuple[list[Effect | None], list[Verdict]]:
    """Return effects and verdicts for pairs of one workload, tested as one family."""
    effects = fit_pairs([[times_of(block) for block in pair.blocks] for pair in pairs])
    return effects, [
        "not applicable" if pair.why and pair.why != NOT_REACHED else verdict
        for pair, verdict in zip(pairs, judge(effects), strict=True)
    ]
