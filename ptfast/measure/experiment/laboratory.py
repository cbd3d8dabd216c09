"""A session of trials: the warm parent process, the budget left, and blocks measured in turn."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from ptfast.config.files.frozen import redact
from ptfast.core.errors import EXIT_BUG, MachineError, ReportedError
from ptfast.measure.experiment.plan import Fit, compare, turn_means
from ptfast.measure.experiment.trial import end_ranks, start_ranks
from ptfast.measure.experiment.verdicts import Effect
from ptfast.measure.experiment.warm_parent import NO_MEMORY, Request, serve

END_S = 5.0
NOT_REACHED = "not reached: give a longer --budget"


@dataclass
class TrialResult:
    """The result of a trial."""

    words: tuple[str, ...]
    time: float = math.nan
    """Log of seconds per token or sample, corrected for differences between rounds of its block."""
    why: str = ""
    """The reason the trial failed; `time` is then `nan`."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts about the run: `loss`, `peak_memory_bytes`, `choices`, `times` of each turn, ..."""

    @property
    def gave_out(self) -> bool:
        """Whether the trial ran out of memory or time, or was killed, rather than raised an error."""
        return bool(self.why) and self.facts.get("code") in (None, NO_MEMORY)

    def raise_failure(self) -> None:
        """Raise the error that ended the trial, if any, as the user's own run would show it."""
        if self.why:
            line = self.facts.get("line") or f"ptfast: error: {self.why}"
            cause = self.facts.get("cause")
            raise ReportedError(line, self.facts.get("exit_code", EXIT_BUG), error=cause)

    def record(self) -> dict[str, Any]:
        left_out = ("environment", "choices", "cause")
        facts = {name: value for name, value in self.facts.items() if name not in left_out}
        return {"words": redact(self.words), "time": self.time, "why": self.why, **facts}


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

        With the option `asks`, the facts of each include `data`: properties that determine which loaders are
        useful. With `spares`, a config fails unless it evaluates and saves with memory to spare.
        """
        configs, warm_s = [list(words) for words in configs], timed_s / 3
        request = Request(configs, timed_s, self.turn_s, least_turns=2, warm_s=warm_s, **options)
        return self._request(request)

    def measure(self, configs: Sequence[Sequence[str]]) -> list[TrialResult]:
        """Measure a block of configs, one trial each."""
        start_s = self.left_s
        request = Request(
            [list(words) for words in configs], self.timed_s, self.turn_s, seed=len(self.blocks)
        )
        found = self._request(request)
        self.block_s = start_s - self.left_s
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
            TrialResult(tuple(words), math.nan, facts.pop("error", ""), facts)
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
        # On SIGTERM, the process ends its trials and removes its files.
        self._process.terminate()
        self._process.join(END_S)
        end_ranks([(self._process, self._connection)])


BASE = "base"


class Comparison:
    """Compares configs with a base config of the same workload, in blocks that each include the base.

    Args:
        base: arguments of the base.
        others: arguments of the other configs, by name.
    """

    def __init__(self, base: Sequence[str], others: Mapping[str, Sequence[str]]) -> None:
        self.words = {**others, BASE: base}
        self.blocks: list[list[tuple[str, TrialResult]]] = []
        self.failed: dict[str, str] = {}
        """Reasons for failed configs, by name."""
        self._waiting = deque(others)

    def measure(
        self, laboratory: Laboratory, *, least: int = 1, most: float = math.inf, keep_s: float = 0.0
    ) -> None:
        """Measure blocks of up to three configs in turn, until only `keep_s` of the budget would be left.

        Args:
            least, most: bounds of the number of blocks.

        Raises:
            ReportedError: the base fails.
        """
        waiting = self._waiting
        while waiting and len(self.blocks) < most:
            if len(self.blocks) >= least and laboratory.left_s - laboratory.block_s < keep_s:
                break
            chosen = [waiting[place % len(waiting)] for place in range(min(max(len(waiting), 2), 3))]
            waiting.rotate(-3)
            names = [BASE, *chosen, *[BASE] * (3 - len(chosen))]
            found = laboratory.measure([self.words[name] for name in names])
            found[0].raise_failure()
            self.blocks.append(list(zip(names, found, strict=True)))
            self.failed |= {name: run.why for name, run in self.blocks[-1] if run.why and name != BASE}
            for name in self.failed.keys() & set(waiting):
                waiting.remove(name)

    def runs(self, name: str) -> list[TrialResult]:
        """Return the trials of a config."""
        return [run for block in self.blocks for each, run in block if each == name]

    def why(self, name: str) -> str:
        """Return the reason a config has no effect; empty if it was measured."""
        return self.failed.get(name) or ("" if self.runs(name) else NOT_REACHED)

    def effects(self) -> tuple[dict[str, Effect], Fit]:
        """Return the speed-up of each other config over the base, and the fit."""
        return compare(BASE, [[(name, run.time) for name, run in block] for block in self.blocks])

    def median(self, metric: str, name: str = BASE) -> float:
        """Return the median of a metric over the processes of a config."""
        return statistics.median(run.facts[metric] for run in self.runs(name) if metric in run.facts)
