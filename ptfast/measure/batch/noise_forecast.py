"""Steps, samples and time to the same loss by batch size, forecast from the gradient noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ptfast.core.errors import PtfastError, ReportedError
from ptfast.core.units import duration, grouped
from ptfast.measure.batch.batch_search import TIE, BatchSearch
from ptfast.measure.batch.gradient_noise import PARTS, train_for_noise
from ptfast.report.terminal.display import say, table

LEAST_STEPS = 10
"""Fewer steps say nothing about their own spread."""
NUM_STRETCHES = 20
"""About how many segments a run is cut into, within each of which gradients are taken to be equally long."""


@dataclass(frozen=True)
class Critical:
    """A batch size at which a step is half as good as one with the true gradient."""

    batch: float | None
    """In samples; None where noise swamps the true gradient."""
    error: float | None
    """Standard error of `batch`."""
    at_least: float | None
    """Lower bound of `batch`, by two standard errors of the true gradient; None where there is none."""

    def steps_ratio(self, batch: float, reference: float, errors: float = 0.0) -> float:
        """Steps to the same loss with `batch`, to those with `reference`: S = S_min (1 + B_crit / B).

        `errors` is by how many standard errors the critical batch is taken larger than estimated.
        """
        assert self.batch is not None
        critical = max(self.batch + errors * (self.error or 0.0), 0.0)
        return (1 + critical / batch) / (1 + critical / reference)

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
        segment = finite[start : start + length]
        mean = sum(row[2] for row in segment) / len(segment)
        if mean > 0:
            scaled += [(row[0] / mean, row[1] / mean) for row in segment]
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


NUM_STEPS = 200
POINTS = 5
"""Parts of the training for which the noise is shown apart, since it grows."""
MOMENTS = ("signal", "noise", "square", "loss")


@dataclass
class NoiseForecast:
    """The measured gradient noise of a config, and the forecast that it allows."""

    batch_size: int
    """Samples of each step that it was measured in."""
    total_steps: int = 0
    """Of the whole run."""
    moments: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in MOMENTS})
    """|G|^2, tr(Sigma), squared norm of the gradient and mean loss of each step."""
    critical: Critical | None = None
    """None for too few steps."""
    points: list[dict[str, Any]] = field(default_factory=list)
    """Steps, loss and noise scale of parts of the training."""
    loss: float | None = None
    """At the end."""

    @property
    def num_steps(self) -> int:
        return len(self.moments["loss"])

    def judge(self) -> None:
        """Estimate from the moments."""
        if not self.num_steps:
            return
        self.critical = estimate(*(self.moments[name] for name in MOMENTS[:3]))
        for part in range(POINTS):
            start, stop = (self.num_steps * end // POINTS for end in (part, part + 1))
            if stop > start:
                losses = self.moments["loss"][start:stop]
                self.loss = sum(losses) / len(losses)
                found = estimate(*(self.moments[name][start:stop] for name in MOMENTS[:3]))
                self.points.append({"steps": (start + 1, stop), "loss": self.loss, "scale": found})

    def rows(self, search: BatchSearch) -> list[dict[str, Any]]:
        """Steps and samples to the loss at the end, and the time where a size was measured, by batch size."""
        critical, own = self.critical, self.batch_size
        if critical is None or critical.batch is None:
            return []
        found = []
        for size in sorted({*search.seen, *(max(round(own * by), 1) for by in (0.5, 1, 2, 4))}):
            ratios = (critical.steps_ratio(size, own, errors) for errors in (-1, 0, 1))
            low, steps, high = sorted(self.num_steps * ratio for ratio in ratios)
            took_s = steps * size / search.median(size) if size in search.seen else None
            row = {"size": size, "steps": steps, "low": low, "high": high}
            found.append(row | {"samples": steps * size, "time_s": took_s})
        return found

    def advise(self, search: BatchSearch) -> tuple[int, float] | None:
        """The measured size that should come to the loss first, and the rate of SGD there to the config's."""
        timed = [row for row in self.rows(search) if row["time_s"] is not None]
        if not timed or self.critical is None:
            return None
        least = min(row["time_s"] for row in timed)
        size = next(row["size"] for row in timed if row["time_s"] <= (1 + TIE) * least)
        return size, self.critical.lr_ratio(size, search.config.batch_size)


def forecast_noise(search: BatchSearch, num_steps: int) -> NoiseForecast:
    """Train for some steps in a child, estimate the critical batch, and show what it means.

    An error that stops the training is printed; the steps before it count.
    """
    parts = search.parts * -(-PARTS // search.parts)
    # Two samples in the least of micro-batches: of one, BatchNorm can tell nothing.
    batch_size = max(search.config.batch_size // parts, 2) * parts
    forecast = NoiseForecast(batch_size)
    say(f"\ngradient noise: {num_steps} steps of {batch_size} samples in {parts} micro-batches")

    def show(result: dict[str, Any]) -> None:
        if "loss" in result:
            shown = forecast.num_steps + len(result["loss"])
            loss = sum(result["loss"]) / len(result["loss"])
            search.display.note(f"  {shown:>6,}  loss {loss:.4g}")
            forecast.total_steps = result["total_steps"]
            for name in MOMENTS:
                forecast.moments[name] += result[name]

    cut = {"batch_size": batch_size, "micro_batches": parts, "num_steps": num_steps}
    keywords = {**cut, "checkpointing": search.checkpointing}
    ended: str | None = None
    try:
        results, killed = search.run(train_for_noise, keywords, show)
        no_room = [f"out of memory: {result['no_room']}" for result in results if "no_room" in result]
        ended = f"ended by {killed}" if killed else next(iter(no_room), None)
    except (PtfastError, ReportedError) as error:
        ended = str(error)
    if ended is None and forecast.num_steps < min(num_steps, forecast.total_steps or num_steps):
        ended = f"the loss diverged or the data ended after {forecast.num_steps} steps"
    forecast.judge()
    _show(forecast, search, ended)
    return forecast


def _show(forecast: NoiseForecast, search: BatchSearch, ended: str | None) -> None:
    if ended is not None:
        say(f"the training for it ended early: {ended}")
    if forecast.points:
        rows = [
            ["{:,} to {:,}".format(*point["steps"]), f"{point['loss']:.4g}", _scale(point["scale"])]
            for point in forecast.points
        ]
        say()
        table(["steps", "loss", "noise scale"], rows)
    critical = forecast.critical
    if critical is None:
        say(f"{forecast.num_steps} steps are too few to tell the gradient noise from chance")
        return
    if critical.batch is None:
        say("the noise swamps the true gradient, whose length cannot be told from nothing in these steps")
        least = f"above about {grouped(critical.at_least)} samples" if critical.at_least else "large"
        say(f"the critical batch is {least}; more --steps, or a larger batch_size, would tell more")
        return
    of_all = f"the first {forecast.num_steps:,} of {forecast.total_steps:,} steps"
    say(f"critical batch: {_scale(critical)} samples over {of_all}")
    rows = forecast.rows(search)
    advised = forecast.advise(search)
    say(f"\npredicted, to the loss of {forecast.loss:.4g}:")
    cells = [
        [
            f"{row['size']:,}" + (" *" if advised and row["size"] == advised[0] else ""),
            f"{row['steps']:,.0f}",
            f"{row['low']:,.0f} to {row['high']:,.0f}" if row["size"] != forecast.batch_size else "as seen",
            f"{row['samples']:,.0f}",
            duration(row["time_s"]) if row["time_s"] is not None else "-",
        ]
        for row in rows
    ]
    table(["batch", "steps", "spread", "samples", "time"], cells)
    say(_advice(forecast, search, rows, advised))


def _advice(
    forecast: NoiseForecast,
    search: BatchSearch,
    rows: Sequence[dict[str, Any]],
    advised: tuple[int, float] | None,
) -> str:
    if advised is None:
        return "none of these sizes was measured"
    size, lr_ratio = advised
    times = {row["size"]: row["time_s"] for row in rows}
    text = f"first at that loss: batch_size={size} in {duration(times[size])}"
    quickest = search.best()
    if quickest != size:
        how = "as soon, for more samples" if times[quickest] < (1 + TIE) * times[size] else "later"
        text += f"\n{quickest:,}, with the most samples/s, is there {how}"
    if size != search.config.batch_size:
        text += f"\nSGD's best rate there should be {lr_ratio:.2g} times that of {search.config.batch_size:,}"
    return f"{text}\nassumed: the best rate at every batch, and noise as in these steps: later ones have more"


def _scale(found: Critical | None) -> str:
    if found is None:
        return "too few steps"
    if found.batch is None:
        return f"> {grouped(found.at_least)}" if found.at_least else "swamped"
    return f"{grouped(found.batch)} +- {grouped(found.error or 0.0)}"
