"""The phases of a step, and the tensors that forward saves for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ptfast.core.protocols import Callback
from ptfast.run import Run

PHASES = ("data", "forward", "backward", "optimizer")
"""The phases, named as in the run's clock."""
INTERRUPTIONS = ("transfer", "gradient_sync")
"""Causes that count toward the phase they interrupt: NVTX ranges must end in the thread that began them, and
another thread reports the wait for gradients."""


@dataclass(eq=False)
class Phases(Callback):
    """Follows the phases of a step: `data`, `forward`, `backward` and `optimizer`, None between steps.

    Args:
        enter: called with the name of a phase when it begins.
        leave: called with its name when it ends.
    """

    enter: Callable[[str], Any]
    leave: Callable[[str], Any]
    name: str | None = None

    def to(self, name: str | None) -> None:
        """End the current phase, and begin `name`."""
        if self.name is not None:
            self.leave(self.name)
        self.name = name
        if name is not None:
            self.enter(name)


@contextmanager
def watched(run: Run, phases: Phases) -> Iterator[None]:
    """Let `phases` follow every step of `run` inside this context, through its clock."""
    clock, to = run.clock, run.clock.to
    # Another watcher may be active already.
    around = vars(clock).get("to")

    def report(cause: str | None) -> None:
        to(cause)
        if cause not in INTERRUPTIONS:
            phases.to(cause if cause in PHASES else None)

    vars(clock)["to"] = report
    run.debug_aids.append(phases)
    try:
        yield
    finally:
        phases.to(None)
        run.debug_aids.remove(phases)
        if around is None:
            del vars(clock)["to"]
        else:
            vars(clock)["to"] = around


def saved_for_backward(model: torch.nn.Module, saved: dict[int, int]) -> saved_tensors_hooks:
    """Return a reusable context that records the bytes autograd saves, by address, except for weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if (address := storage.data_ptr()) not in weights:
            saved[address] = storage.nbytes()
        return tensor

    return saved_tensors_hooks(note, lambda tensor: tensor)
