"""The critical batch size: estimated from moments of gradients, and what it says about other batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

LEAST_STEPS = 10
"""Fewer steps say nothing about their own spread."""
NUM_STRETCHES = 20
"""About how many stretches a run is cut into, within each of which gradients are taken to be equally long."""


@dataclass(frozen=True)
class Critical:
    """A batch size at which a step is half as good as one with the true gradient."""

    batch: float | None
    """In samples; None where noise swamps the true gradient."""
    error: float | None
    """Standard error of `batch`."""
    at_least: float | None
    """Lower bound of `batch`, by two standard errors of the true gradient; None where there is none."""

    def moved(self, errors: float) -> Critical:
        """With a batch that is so many standard errors larger."""
        assert self.batch is not None
        assert self.error is not None
        return replace(self, batch=max(self.batch + errors * self.error, 0.0))

    def steps_ratio(self, batch: float, reference: float) -> float:
        """Steps to the same loss with `batch`, to those with `reference`: S = S_min (1 + B_crit / B)."""
        assert self.batch is not None
        return (1 + self.batch / batch) / (1 + self.batch / reference)

    def lr_ratio(self, batch: float, reference: float) -> float:
        """Best rate of SGD with `batch`, to that with `reference`: eps_max / (1 + B_crit / B)."""
        return 1 / self.steps_ratio(batch, reference)


def estimate(signal: Sequence[float], noise: Sequence[float], square: Sequence[float]) -> Critical | None:
    """The critical batch of the steps given, all of them taken together.

    One small step with batch B is worth 1 / (1 + b/B) of a step with the true gradient, b = tr(Sigma)/|G|^2
    being the noise scale there. A whole run takes S_min (1 + B_crit/B) steps, with B_crit the mean of b over
    the run weighted by what each step is worth. That worth is |G|^2 over the expected square of a batch's
    gradient, so B_crit is the sum of tr(Sigma) over the sum of |G|^2, each divided by that square. Numerator
    and denominator are summed apart: their quotients in single steps are mostly noise.

    Args:
        signal, noise: |G|^2 and tr(Sigma) of each step, unbiased.
        square: squared norm of each step's gradient.

    Returns:
        The estimate with the error that a jackknife over steps gives it, or None for too few steps.

    Source: McCandlish, Kaplan, Amodei et al. 2018, arXiv:1812.06162, section 2.2, appendices A and D.
    """
    finite = [row for row in zip(signal, noise, square, strict=True) if all(map(math.isfinite, row))]
    if len(finite) < LEAST_STEPS:
        return None
    length = max(len(finite) // NUM_STRETCHES, 5)
    scaled: list[tuple[float, float]] = []
    for start in range(0, len(finite), length):
        stretch = finite[start : start + length]
        mean = sum(row[2] for row in stretch) / len(stretch)
        if mean > 0:
            scaled += [(row[0] / mean, row[1] / mean) for row in stretch]
    num_steps = len(scaled)
    if not num_steps:
        return None
    below, above = (sum(column) for column in zip(*scaled, strict=True))
    mean = below / num_steps
    spread = math.sqrt(sum((row[0] - mean) ** 2 for row in scaled) / (num_steps - 1) / num_steps)
    highest = mean + 2 * spread
    at_least = above / num_steps / highest if highest > 0 else None
    # Of a true gradient within two errors of nothing, the quotient could be anything.
    if mean <= 2 * spread:
        return Critical(None, None, at_least)
    without = [(above - row[1]) / (below - row[0]) for row in scaled]
    middle = sum(without) / num_steps
    error = math.sqrt((num_steps - 1) / num_steps * sum((value - middle) ** 2 for value in without))
    return Critical(above / below, error, at_least)
