"""Which parameters train at which step: freezing and thawing, as a pure function of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ptfast.core.errors import ConfigError


@dataclass(frozen=True)
class Window:
    """Parameters that train in steps `first` (counted from 0) up to, not including, `last`."""

    parameters: Sequence[Tensor]
    first: int
    last: float
    """Infinite where they train to the end."""


class Freezing:
    """Parameters that train in a part of the run only.

    A frozen parameter needs no gradient: it is not updated, has no weight decay, its momentum stands still,
    and backward ends where nothing below trains. Its BatchNorm keeps measuring: running statistics are no
    parameters.

    Args:
        windows: of the parameters that some step freezes.
        others: there are parameters that always train.
        total_steps: of the run.
        extendable: a longer run would freeze at the same steps.

    Raises:
        ConfigError: C011 where a window is empty, or where no parameter at all trains in some step.
    """

    def __init__(
        self, windows: Sequence[Window], *, others: bool, total_steps: int, extendable: bool
    ) -> None:
        self._windows, self.extendable = windows, extendable
        edges = {edge for window in windows for edge in (window.first, window.last)}
        self.switch_steps = tuple(sorted(int(edge) for edge in edges if 0 < edge < total_steps))
        for step in (0, *self.switch_steps):
            if not others and not any(window.first <= step < window.last for window in windows):
                what = f"no parameter trains at step {step:,}"
                hint = "Let some begin earlier or train longer"
                raise ConfigError("C011", what, key="optimizer.groups", suggestion=hint)

    def apply(self, step: int) -> bool:
        """Have those parameters take gradients that train in `step`; say whether that changed any."""
        changed = False
        for window in self._windows:
            trains = window.first <= step < window.last
            for parameter in window.parameters:
                changed |= parameter.requires_grad is not trains
                parameter.requires_grad_(trains)
        return changed
