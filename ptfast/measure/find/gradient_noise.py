"""The gradient noise of a recipe, measured while it trains, and what it forecasts for other batch sizes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptfast.core import devices
from ptfast.core.distributed import sum_over_ranks
from ptfast.core.errors import ConfigError, DataError, PtfastError, ReportedError
from ptfast.core.protocols import StepBatch, takes_own_steps
from ptfast.core.tensors.torch_internals import backward
from ptfast.core.units import duration, grouped
from ptfast.measure.experiment.trial import TrialRank, measure_once
from ptfast.measure.find.batch_search import TIE, BatchSearch
from ptfast.report.terminal.display import Display, say, table
from ptfast.run import Run
from ptfast.techniques.curriculum import Curriculum
from ptfast.techniques.gradients.clipping import global_norm
from ptfast.training.build import build
from ptfast.training.step import Trainer

PARTS = 4
"""Fewest micro-batches of a step: with two, the estimate would rest on a single product."""
READS, NUM_STEPS = 5, 200
LEAST_STEPS = 10
"""Fewest steps that tell their own spread."""
NUM_SEGMENTS = 20
"""About how many segments a run is cut into; within each, gradients are taken to be equally long."""
MOMENTS = ("signal", "noise", "square", "loss")


def train_for_noise(trial: TrialRank, *, batch_size: int, micro_batches: int, num_steps: int) -> None:
    """Train a config from its start and report the moments of its gradients, some steps each.

    Batches of `batch_size` are those of all ranks; training may end before `num_steps` steps.
    """
    gradients = trial.config.gradients.model_copy(update={"accumulate": 1})
    batch = {"batch_size": batch_size, "micro_batches": micro_batches, "gradients": gradients}
    plain = {"curriculum": Curriculum(), "callbacks": []}
    config = trial.config.model_copy(update=batch | plain)
    with trial.reporting_lack_of_memory({}):
        run = build(config, ranks=trial.ranks, folder=trial.folder, display=Display())
        with contextlib.closing(run):
            for moments in noise_of(run, num_steps):
                trial.report(moments)


def noise_of(run: Run, num_steps: int, reads: int = READS) -> Iterator[dict[str, Any]]:
    """Train `run` and yield the moments of its gradients, a segment of steps at a time, of `reads` in all.

    Yields:
        Lists with an entry for each step: `signal` and `noise` as `moments` gives them, `square`, the squared
        norm of the step's gradient, and the mean `loss`; and `total_steps`. Ends early if the loss is no
        longer finite or the data ends.
    """
    if takes_own_steps(run.task):
        what = "takes its own steps, and the noise scale needs the gradients of a single loss"
        raise ConfigError("C011", what, key="task", value=run.resolved.task)
    num_steps = min(num_steps, run.total_steps)
    trainer = NoiseTrainer(run)
    batches = trainer.warm_up(run.train_loader.steps(0, num_steps))
    trainer.rows.clear()
    for part in range(reads):
        try:
            trainer.train(batches, num_steps * (part + 1) // reads)
        except DataError as error:
            if error.code != "D006":
                raise
            num_steps = 0
        found = trainer.read()
        num_finite = next((i for i, loss in enumerate(found["loss"]) if not math.isfinite(loss)), None)
        if found["loss"] and num_finite != 0:
            seen = {name: values[:num_finite] for name, values in found.items()}
            yield {**seen, "total_steps": run.total_steps}
        if num_finite is not None or not num_steps:
            return


class NoiseTrainer(Trainer):
    """Takes the steps of `Trainer`, and keeps the norms of the gradients of single micro-batches.

    Cost: a second set of gradients, two passes over them for every micro-batch; among ranks, gradients cross
    after the backward passes and not during the last. No step makes the host wait.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.rows: list[tuple[Tensor, Tensor]] = []

    def accumulate(self, batch: StepBatch, step: int) -> None:
        """Accumulate the gradient of the step, and keep the norms of its parts."""
        run, ranks, window, alone = self.run, self.run.ranks, self.window, self.batchnorm is None
        weight: Tensor | None = None
        parts: list[tuple[Tensor, float]] = []
        loss_before, items_before = window.sums()
        sums: dict[Tensor, Tensor] = {}
        for index, (data, num_samples) in enumerate(batch.micro_batches):
            if not num_samples and alone:
                continue
            run.seed_step(run.seed, step, self.first_micro_batch + index)
            with contextlib.nullcontext() if alone else self.among_ranks(num_samples, exchanges=False):
                loss, count = self.loss_of(data, num_samples, step)
                weight = self.item_weight(batch, count) if weight is None else weight
                if self.counts_late:
                    what = "the noise scale needs a loss whose items are counted before it is known"
                    raise ConfigError("C011", what, key="task", value=run.resolved.task)
                backward(loss, weight if num_samples else weight * 0)
            if num_samples:
                window.add(loss.detach(), count)
                parts.append((self._square(), num_samples / batch.num_samples))
            for parameter in self.parameters:
                if parameter.grad is not None:
                    if sums.setdefault(parameter, parameter.grad) is not parameter.grad:
                        sums[parameter].add_(parameter.grad)
                    parameter.grad = None
        for parameter in self.parameters:
            if ranks.distributed and parameter.requires_grad:
                whole = sums.setdefault(parameter, torch.zeros_like(parameter))
                sum_over_ranks(whole, ranks).div_(ranks.num_ranks)
            parameter.grad = sums.get(parameter)
        zero = torch.zeros((), dtype=torch.float32, device=run.device)
        # Gradients are weighted for averaging over ranks: those of one rank are too long by their number.
        squares = sum((square for square, _ in parts), zero) / ranks.num_ranks**2
        weighted = sum((square / share for square, share in parts), zero) / ranks.num_ranks**2
        figures = squares, weighted, sum(share**2 for _, share in parts), len(parts)
        of_step = batch.num_samples / ranks.num_ranks
        losses = window.loss_sum - loss_before, window.num_items - items_before
        # Numbers reach the device as arguments of the sum; making them tensors would need a copy.
        row = [(zero + figure).float() for figure in (*figures, of_step, *losses)]
        self.rows.append((torch.stack(row), self._square()))

    def read(self) -> dict[str, list[float]]:
        """Moments of the steps since the last call, over all ranks; makes the host wait for the device."""
        if not self.rows:
            return {name: [] for name in MOMENTS}
        rows = torch.stack([row for row, _ in self.rows]).to(devices.sum_dtype(self.run.device))
        rows = sum_over_ranks(rows, self.run.ranks).tolist()
        of_steps = torch.stack([square for _, square in self.rows]).tolist()
        figures = [
            (*moments(square, *parts, num_train=self.run.info.num_train), square, loss / (items or 1))
            for (*parts, loss, items), square in zip(rows, of_steps, strict=True)
        ]
        self.rows.clear()
        return dict(zip(MOMENTS, map(list, zip(*figures, strict=True)), strict=True))

    def _square(self) -> Tensor:
        """The squared norm of the current gradients, without fp16's scale; on the device."""
        norm = global_norm([p.grad for p in self.parameters if p.grad is not None])
        return (norm if self.fp16 is None else norm / self.fp16.scale).float() ** 2


def moments(
    square: float,
    squares: float,
    weighted: float,
    shares_squared: float,
    num_parts: float,
    num_samples: float,
    num_train: int | None = None,
) -> tuple[float, float]:
    """Unbiased squared norm of the true gradient, and variance of a sample's, from one step's micro-batches.

    Let micro-batch i, a share f_i of the samples, add h_i to the step's gradient. Products of different parts
    estimate the true gradient alone, since their noise is independent.

    Args:
        square, squares: |sum of h_i|^2, and the sum of |h_i|^2.
        weighted, shares_squared: sums of |h_i|^2 / f_i, and of f_i^2.
        num_samples: of the step.
        num_train: samples of the data; without replacement, parts are a little less alike than by chance.

    Returns:
        |G|^2, which may come out negative, and tr(Sigma); not numbers where there is a single part.

    Source: McCandlish, Kaplan, Amodei et al. 2018, arXiv:1812.06162, appendix A.1, for parts of any size.
    """
    if num_parts < 2:
        return math.nan, math.nan
    variance = (weighted - square) / (num_parts - 1) * num_samples
    signal = (square - squares) / (1 - shares_squared)
    return signal + (variance / num_train if num_train else 0.0), variance


@dataclass(frozen=True)
class Critical:
    """A batch size at which a step is half as good as one with the true gradient."""

    batch: float | None
    """In samples; None if noise swamps the true gradient."""
    error: float | None
    """Standard error of `batch`."""
    at_least: float | None
    """Lower bound of `batch`, by two standard errors of the true gradient, if there is one."""

    def __str__(self) -> str:
        if self.batch is None:
            return f"> {grouped(self.at_least)}" if self.at_least else "swamped"
        return f"{grouped(self.batch)} +- {grouped(self.error or 0.0)}"

    def steps_ratio(self, batch: float, reference: float) -> float:
        """Steps to the same loss with `batch`, to those with `reference`: S = S_min (1 + B_crit / B).

        SGD's best rate, eps_max / (1 + B_crit / B), goes with its inverse.
        """
        assert self.batch is not None
        return (1 + self.batch / batch) / (1 + self.batch / reference)


def estimate(signal: Sequence[float], noise: Sequence[float], square: Sequence[float]) -> Critical | None:
    """The critical batch of some steps, with its jackknife error; None for too few of them.

    One small step with batch B is worth 1 / (1 + b/B) of a step with the true gradient, b = tr(Sigma)/|G|^2
    being the noise scale there. A whole run takes S_min (1 + B_crit/B) steps, with B_crit the mean of b over
    the run weighted by what each step is worth. That worth is |G|^2 over the expected square of a batch's
    gradient, so B_crit is the sum of tr(Sigma) over the sum of |G|^2, each divided by that square. Numerator
    and denominator are summed apart: their quotients in single steps are mostly noise.

    Args:
        signal, noise, square: |G|^2 and tr(Sigma) of each step, unbiased, and |gradient|^2 of its batch.

    Source: McCandlish, Kaplan, Amodei et al. 2018, arXiv:1812.06162, section 2.2, appendices A and D.
    """
    steps = np.array([signal, noise, square]).T
    steps = steps[np.isfinite(steps).all(axis=1)]
    if len(steps) < LEAST_STEPS:
        return None
    length = max(len(steps) // NUM_SEGMENTS, 5)
    segments = [steps[start : start + length] for start in range(0, len(steps), length)]
    scaled = [segment / mean for segment in segments if (mean := segment[:, 2].mean()) > 0]
    if not scaled:
        return None
    below, above, _ = np.concatenate(scaled).T
    count, mean = len(below), float(below.mean())
    spread = float(below.std(ddof=1)) / math.sqrt(count)
    highest = mean + 2 * spread
    at_least = float(above.mean()) / highest if highest > 0 else None
    # With a true gradient within two errors of zero, the quotient could be anything.
    if mean <= 2 * spread:
        return Critical(None, None, at_least)
    without = (above.sum() - above) / (below.sum() - below)
    return Critical(float(above.mean()) / mean, math.sqrt(count - 1) * float(without.std()), at_least)


@dataclass
class NoiseForecast:
    """The measured gradient noise of a config, and the forecast from it."""

    batch_size: int
    """Of the measured steps."""
    total_steps: int = 0
    moments: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in MOMENTS})
    """|G|^2, tr(Sigma), squared norm of the gradient and mean loss of each step."""
    critical: Critical | None = None
    points: list[dict[str, Any]] = field(default_factory=list)
    """The last step, the loss and the noise scale of parts of the training: the noise grows."""

    def rows(self, search: BatchSearch) -> list[dict[str, Any]]:
        """Steps, samples and seconds to the loss at the end, for each size that was measured."""
        if self.critical is None or self.critical.batch is None:
            return []
        found = []
        for size in sorted(search.seen):
            steps = len(self.moments["loss"]) * self.critical.steps_ratio(size, self.batch_size)
            took_s = steps * size / search.median(size)
            found.append({"size": size, "steps": steps, "samples": steps * size, "time_s": took_s})
        return found

    def advise(self, search: BatchSearch) -> tuple[int, float] | None:
        """The measured size that should reach the loss first, and SGD's best rate there to the config's."""
        rows = self.rows(search)
        if not rows or self.critical is None:
            return None
        least = min(row["time_s"] for row in rows)
        size = next(row["size"] for row in rows if row["time_s"] <= (1 + TIE) * least)
        return size, 1 / self.critical.steps_ratio(size, search.config.batch_size)


def forecast_noise(search: BatchSearch, num_steps: int) -> NoiseForecast:
    """Train for some steps in a child, estimate the critical batch, and show what it means.

    An error that stops the training is printed; the steps before it count.
    """
    parts = search.parts * -(-PARTS // search.parts)
    # Micro-batches have two samples at least: BatchNorm cannot train on one.
    batch_size = max(search.config.batch_size // parts, 2) * parts
    forecast = NoiseForecast(batch_size)
    moments = forecast.moments
    say(f"\ngradient noise: {num_steps} steps of {batch_size} samples in {parts} micro-batches")

    def on_result(result: dict[str, Any]) -> None:
        if "loss" in result:
            for name in MOMENTS:
                moments[name] += result[name]
            forecast.total_steps = result["total_steps"]
            count, loss = len(moments["loss"]), sum(result["loss"]) / len(result["loss"])
            scale = estimate(*(result[name] for name in MOMENTS[:3]))
            forecast.points.append({"steps": count, "loss": loss, "scale": scale})
            say(f"  {count:>6,}  loss {loss:.4g}  noise scale {scale or 'unknown'}")

    try:
        cut = {"batch_size": batch_size, "micro_batches": parts, "num_steps": num_steps}
        where = search.composed, search.config, search.folder
        results, killed = measure_once(train_for_noise, *where, cut, on_result)
        no_room = (f"out of memory: {result['no_room']}" for result in results if "no_room" in result)
        ended = f"ended by {killed}" if killed else next(no_room, None)
    except (PtfastError, ReportedError) as error:
        ended = str(error)
    count = len(moments["loss"])
    if ended is None and count < min(num_steps, forecast.total_steps or num_steps):
        ended = f"the loss diverged or the data ended after {count} steps"
    forecast.critical = estimate(*(moments[name] for name in MOMENTS[:3]))
    _show(forecast, search, ended)
    return forecast


def _show(forecast: NoiseForecast, search: BatchSearch, ended: str | None) -> None:
    num_steps, critical = len(forecast.moments["loss"]), forecast.critical
    if ended is not None:
        say(f"the training for it ended early: {ended}")
    if critical is None:
        say(f"{num_steps} steps are too few to tell the gradient noise from chance")
        return
    if critical.batch is None:
        say("the noise swamps the true gradient, whose length cannot be told from nothing in these steps")
        least = f"above about {grouped(critical.at_least)} samples" if critical.at_least else "large"
        say(f"the critical batch is {least}; more --steps, or a larger batch_size, would tell more")
        return
    say(f"critical batch: {critical} samples over the first {num_steps:,} of {forecast.total_steps:,} steps")
    advised, cells = forecast.advise(search), list[list[str]]()
    for row in forecast.rows(search):
        name = f"{row['size']:,}" + (" *" if advised and row["size"] == advised[0] else "")
        cells.append([name, f"{row['steps']:,.0f}", f"{row['samples']:,.0f}", duration(row["time_s"])])
    say(f"\npredicted, to the loss of {forecast.points[-1]['loss']:.4g}:")
    table(["batch", "steps", "samples", "time"], cells)
    if advised is not None:
        size, lr_ratio = advised
        say(f"first at that loss: batch_size={size}")
        if size != search.config.batch_size:
            say(f"SGD's best rate there should be {lr_ratio:.2g} times that of {search.config.batch_size:,}")
