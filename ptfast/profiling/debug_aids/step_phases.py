"""Phases of a step, reported to watchers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ptfast.core.protocols import Callback
from ptfast.run import Run

PHASES = ("data", "forward", "backward", "optimizer")
"""Causes of a run's clock that are phases."""
PARTS = ("transfer", "gradient_sync")
"""Causes counted to the phase that they interrupt: NVTX ranges end in the thread in which they began, and the
wait for gradients is reported by another."""


class Phases(Callback):
    """The phase of a step: `data`, `forward`, `backward` or `optimizer`, or None between steps.

    Args:
        enter: called with the name of a phase as it begins.
        leave: called with its name as it ends.
    """

    def __init__(self, enter: Callable[[str], Any], leave: Callable[[str], Any]) -> None:
        self.enter, self.leave = enter, leave
        self.name: str | None = None

    def to(self, name: str | None) -> None:
        """End the phase that is open, and begin `name`."""
        if self.name is not None:
            self.leave(self.name)
        self.name = name
        if name is not None:
            self.enter(name)


@contextmanager
def watched(run: Run, phases: Phases) -> Iterator[None]:
    """Report the phases of every step of `run`, by the marks of its clock."""
    clock, to = run.clock, run.clock.to
    # Another may be watching already.
    around = vars(clock).get("to")

    def report(cause: str | None) -> None:
        to(cause)
        if cause not in PARTS:
            phases.to(cause if cause in PHASES else None)

    vars(clock)["to"] = report
    run.watchers.append(phases)
    try:
        yield
    finally:
        phases.to(None)
        run.watchers.remove(phases)
        if around is None:
            del vars(clock)["to"]
        else:
            vars(clock)["to"] = around
