"""The gradient noise of a recipe, from the gradients of single micro-batches while it trains."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ptfast.core import devices
from ptfast.core.distributed import sum_over_ranks
from ptfast.core.errors import ConfigError, DataError
from ptfast.core.protocols import StepBatch, takes_own_steps
from ptfast.measure.batch.batch_search import with_mode
from ptfast.measure.trial_rank import TrialRank
from ptfast.run import Run
from ptfast.techniques.curriculum import Curriculum
from ptfast.techniques.gradients.clipping import global_norm
from ptfast.training.step import Trainer

PARTS = 4
"""Least micro-batches of a step: of two, the product of one pair would have to say what all of them share."""
READS = 10
"""Times that the figures are read from the device."""
_nothing = contextlib.nullcontext()


def train_for_noise(
    trial: TrialRank,
    *,
    batch_size: int,
    micro_batches: int,
    num_steps: int,
    checkpointing: str | None = None,
) -> None:
    """Train a config from its start and report the moments of its gradients, some steps each.

    Args:
        batch_size, micro_batches: that every step takes, over all ranks.
        num_steps: optimizer steps, or up to the end of the data or of the run.
        checkpointing: mode in place of the config's.
    """
    config = trial.config
    changed: dict[str, Any] = {
        "batch_size": batch_size,
        "micro_batches": micro_batches,
        "gradients": config.gradients.model_copy(update={"accumulate": 1}),
        "curriculum": Curriculum(),
        "callbacks": [],
    }
    if checkpointing is not None:
        changed["checkpointing"] = with_mode(config.checkpointing, checkpointing)
    with trial.building(config.model_copy(update=changed), {}) as run:
        for moments in noise_of(run, num_steps):
            trial.report(moments)


def noise_of(run: Run, num_steps: int, reads: int = READS) -> Iterator[dict[str, Any]]:
    """Train `run` and yield the moments of its gradients, a segment of steps at a time, of `reads` in all.

    Yields:
        Lists with an entry for each step: `signal` and `noise` as `moments` gives them, `square`, the squared
        norm of the step's gradient, and the mean `loss`; and `num_train` and `total_steps`. Ends early where
        the loss is no longer finite, or the data ends: what was seen before counts.
    """
    if takes_own_steps(run.task):
        what = "takes its steps itself, and the noise is that of the gradients of one loss"
        raise ConfigError("C011", what, key="task", value=run.resolved.task)
    num_steps = min(num_steps, run.total_steps)
    trainer = NoiseTrainer(run)
    batches = trainer.warm_up(run.train_loader.steps(0, num_steps))
    facts = {"num_train": run.info.num_train, "total_steps": run.total_steps}
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
            yield facts | {name: values[:num_finite] for name, values in found.items()}
        if num_finite is not None or not num_steps:
            return


class NoiseTrainer(Trainer):
    """Takes the steps that `Trainer` takes, and keeps the norms of what its micro-batches would do alone.

    Cost: a second set of gradients, two passes over them for every micro-batch; among ranks, gradients cross
    after the backward passes and not during the last. No step makes the host wait.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.rows: list[tuple[Tensor, Tensor]] = []

    def accumulate(self, batch: StepBatch, step: int) -> None:
        """Keep the norms on the way to the gradient of the step."""
        run, ranks, window, alone = self.run, self.run.ranks, self.window, self.statistics is None
        weight = self.item_weight(batch)
        zero = torch.zeros((), dtype=torch.float32, device=run.device)
        squares, weighted, shares_squared, num_parts = zero.clone(), zero.clone(), 0.0, 0
        loss_before, items_before = window.sums()
        sums: dict[Tensor, Tensor] = {}
        for index, (data, num_samples) in enumerate(batch.micro_batches):
            if not num_samples and alone:
                continue
            run.seed_step(run.seed, step, self.first_micro_batch + index)
            with _nothing if alone else self.among_ranks(num_samples, exchanges=False):
                loss, count = self.loss_of(data, step)
                loss.backward(weight if num_samples else weight * 0)
            if num_samples:
                window.add(loss.detach(), count)
                share = num_samples / batch.num_samples
                square = self._square()
                squares += square
                weighted += square / share
                shares_squared += share**2
                num_parts += 1
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
        # The weight holds the ranks that gradients are averaged over: a rank's own are too long by as much.
        figures = (
            *(squares / ranks.num_ranks**2, weighted / ranks.num_ranks**2, shares_squared, num_parts),
            *(window.loss_sum - loss_before, window.num_items - items_before),
            batch.num_samples / ranks.num_ranks,
        )
        # A number goes to the device as an argument of the sum; a tensor of it would be copied there.
        self.rows.append((torch.stack([(zero + figure).float() for figure in figures]), self._square()))

    def read(self) -> dict[str, list[float]]:
        """Moments of the steps since the last call, over all ranks; makes the host wait for the device."""
        found: dict[str, list[float]] = {"signal": [], "noise": [], "square": [], "loss": []}
        if self.rows:
            rows = torch.stack([row for row, _ in self.rows]).to(devices.sum_dtype(self.run.device))
            rows = sum_over_ranks(rows, self.run.ranks)
            of_steps = torch.stack([square for _, square in self.rows]).tolist()
            for row, square in zip(rows.tolist(), of_steps, strict=True):
                squares, weighted, shares_squared, num_parts, loss, items, num_samples = row
                parts = squares, weighted, shares_squared, num_parts
                signal, noise = moments(square, *parts, num_samples, self.run.info.num_train)
                figures = {"signal": signal, "noise": noise, "square": square, "loss": loss / max(items, 1)}
                for name, value in figures.items():
                    found[name].append(value)
        self.rows.clear()
        return found

    def _square(self) -> Tensor:
        """The squared norm of the gradients that there are, without fp16's scale; on the device."""
        norm = global_norm([p.grad for p in self.parameters if p.grad is not None])
        return (norm if self.scaled is None else norm / self.scaled.scale).float() ** 2


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

    With h_i the part that micro-batch i, a share f_i of the samples, adds to the step's gradient:
    the products of different parts hold the true gradient alone, for their noise is independent.

    Args:
        square: |sum of h_i|^2.
        squares: sum of |h_i|^2.
        weighted: sum of |h_i|^2 / f_i.
        shares_squared: sum of f_i^2.
        num_parts: micro-batches.
        num_samples: of the step.
        num_train: samples that are drawn from without putting any back, which makes parts of one batch a
            little less alike than chance would.

    Returns:
        |G|^2, which may come out negative, and tr(Sigma); not numbers where there is a single part.

    Source: McCandlish, Kaplan, Amodei et al. 2018, arXiv:1812.06162, appendix A.1, for parts of any size.
    """
    if num_parts < 2:
        return math.nan, math.nan
    variance = (weighted - square) / (num_parts - 1) * num_samples
    signal = (square - squares) / (1 - shares_squared)
    return signal + (variance / num_train if num_train else 0.0), variance
