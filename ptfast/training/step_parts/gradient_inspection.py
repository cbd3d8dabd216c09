"""A look at gradients, once in a stretch of steps: their norm, and parameters that get none."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ptfast.core.protocols import takes_own_steps
from ptfast.core.run import Run
from ptfast.techniques.gradients.clipping import global_norm
from ptfast.techniques.precision.scaled_steps import ScaledSteps

NAMED = 5
"""Parameters without a gradient that are named; the others are counted."""


class GradientInspection:
    """Looks at gradients at the last step before the host looks up from training; reads nothing of them.

    Args:
        run: on every rank.
        parameters: those that train.
        scaled: takes the steps of a run whose gradients are scaled.
    """

    def __init__(self, run: Run, parameters: Sequence[Tensor], scaled: ScaledSteps | None) -> None:
        self._run, self._parameters, self._scaled = run, parameters, scaled
        self._unreached: set[str] | None = None
        self._reported = False
        self.norm: Tensor | None = None
        """Of all gradients, summed over ranks where that is averaged; on the device."""

    @property
    def wanted(self) -> bool:
        """True if there is something left to look for."""
        run = self._run
        if takes_own_steps(run.task):
            return False  # it leaves no gradients to look at
        return not self._reported or run.settings.log_norm or run.ranks.distributed

    def __call__(self) -> None:
        """Look at the gradients that there are now."""
        run = self._run
        if run.ranks.distributed:
            run.forward.check_gradients()
        if run.settings.log_norm:
            norm = global_norm([p.grad for p in self._parameters if p.grad is not None])
            self.norm = norm if self._scaled is None else norm / self._scaled.scale
        if not self._reported:
            named = run.model.named_parameters()
            missing = {name for name, p in named if p.requires_grad and p.grad is None}
            self._unreached = missing if self._unreached is None else self._unreached & missing

    def report(self) -> None:
        """Name, once, the parameters without a gradient in any look: steps leave those alone."""
        if self._unreached and not self._reported:
            names = sorted(self._unreached)
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            what = "get no gradient, and so neither updates nor weight decay"
            self._run.display.note(f"{', '.join(names[:NAMED])}{more} {what}")
        self._reported = True
