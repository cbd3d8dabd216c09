"""Processes of the variants that are being compared: started together, warmed up in turn, and kept."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

from ptfast.config.compose import Composed
from ptfast.config.overrides import merge
from ptfast.config.read import read_config
from ptfast.config.schema import Config
from ptfast.core.errors import MachineError, PtfastError, ReportedError
from ptfast.launch.launcher import resolve_num_ranks
from ptfast.measure.trials.comparison import Arm
from ptfast.measure.trials.trial_process import TrialProcess

MOST_ALIVE = 3
"""Processes that wait for their turn at once; each holds the memory of a run."""
OUT_OF_MEMORY = "out of memory"


class ArmPool:
    """Processes by arm, and what became of those that failed.

    Args:
        arguments: the user's words, over which those of an arm are laid.
        folder: for the files of the processes.
    """

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.arguments, self._folder = arguments, folder
        self.alive: dict[Arm, TrialProcess] = {}
        """Processes that are warm, the one that was started first in front."""
        self.warm: dict[Arm, dict[str, Any]] = {}
        """What building and warming up has reported."""
        self.step_s: dict[Arm, float] = {}
        """Seconds of a step, of which the latest stretch counts half."""
        self.lost: dict[Arm, Exception] = {}
        """What ended the others."""
        self._configs: dict[Arm, tuple[Composed, Config]] = {}
        self._num_processes = 0

    def config(self, arm: Arm) -> tuple[Composed, Config]:
        """The whole config of an arm, raw and checked.

        Raises:
            ConfigError: its words make none.
        """
        if arm not in self._configs:
            self._configs[arm] = read_config(merge(self.arguments, arm.overrides))
        return self._configs[arm]

    def prepare(self, *arms: Arm) -> None:
        """Start processes for arms that have none, all at once, and warm them up one after another.

        Others that idle give way where there are too many of them, or where memory runs out.
        """
        wanted = [arm for arm in dict.fromkeys(arms) if arm not in self.alive and arm not in self.lost]
        idle = [arm for arm in self.alive if arm not in arms]
        self.end(*idle[: max(0, len(self.alive) + len(wanted) - MOST_ALIVE)])
        self._start(wanted)
        short = [arm for arm in wanted if OUT_OF_MEMORY in str(self.lost.get(arm, ""))]
        if short and (idle := [arm for arm in self.alive if arm not in arms]):
            self.end(*idle)
            for arm in short:
                del self.lost[arm]
            self._start(short)

    def train(self, arm: Arm, num_steps: int) -> dict[str, Any] | None:
        """Train a stretch; returns its figures, or None where the arm is lost."""
        if figures := self._ask(arm, {"num_steps": num_steps}):
            self.step_s[arm] = math.sqrt(self.step_s[arm] * figures["wall_s"] / num_steps)
        return figures

    def end(self, *arms: Arm) -> None:
        """End the processes of arms."""
        for arm in arms:
            if process := self.alive.pop(arm, None):
                process.__exit__()

    def close(self) -> None:
        """End all processes."""
        self.end(*list(self.alive))

    def _start(self, arms: list[Arm]) -> None:
        for arm in arms:
            self._num_processes += 1
            folder = self._folder / str(self._num_processes)
            try:
                composed, config = self.config(arm)
                num_ranks = None if config.parallel.strategy == "single" else resolve_num_ranks(config)
                self.alive[arm] = process = TrialProcess(composed, folder, num_ranks, "stretch")
                process.request({})
            except PtfastError as error:
                self.lost[arm] = error
        for arm in arms:
            self.warm[arm] = self._answer(arm) or {}
        # One by one: nothing is timed while another is being built.
        for arm in arms:
            self.warm[arm] |= self._ask(arm, {}) or {}
            self.step_s[arm] = self.warm[arm].get("step_s", 0.0)

    def _ask(self, arm: Arm, keywords: dict[str, Any]) -> dict[str, Any] | None:
        if arm in self.alive:
            self.alive[arm].request(keywords)
        return self._answer(arm)

    def _answer(self, arm: Arm) -> dict[str, Any] | None:
        """The result of what an arm was asked for; None where it is lost."""
        if arm not in self.alive:
            return None
        try:
            results, killed = self.alive[arm].results()
        except (PtfastError, ReportedError) as error:
            self.lost[arm] = error
        else:
            if killed is None and "no_room" not in results[-1]:
                return results[-1]
            what = OUT_OF_MEMORY if killed in (None, signal.SIGKILL) else "the process died"
            by = f", ended by {signal.Signals(killed).name}" if killed else ""
            self.lost[arm] = MachineError("E002", what + by)
        self.end(arm)
        return None
