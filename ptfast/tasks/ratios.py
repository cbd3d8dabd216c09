"""Metrics that are ratios of two sums: kept on the device, added up over batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ptfast.core import devices
from ptfast.core.protocols import IGNORE_INDEX

if TYPE_CHECKING:
    from typing_extensions import Self

RatioTerms = tuple[Tensor, Tensor | int]
"""A batch's terms in the numerator and the denominator of a ratio."""


class DeviceSums:
    """Sums of one evaluation, kept on the device so that batches do not make the host wait.

    They are exact for whole numbers up to 2**53.
    """

    def __init__(self, names: Iterable[str], *shape: int) -> None:
        self._names = tuple(names)
        self.sums = torch.zeros(shape, dtype=devices.sum_dtype(torch.device("cpu")))
        """The sums of this rank so far."""

    def to(self, device: Any) -> Self:
        """Keep the sums on `device`; call it before the first batch."""
        dtype = devices.sum_dtype(torch.device(device))
        self.sums = torch.zeros_like(self.sums, dtype=dtype, device=device)
        return self

    def keys(self) -> tuple[str, ...]:
        return self._names

    def over_ranks(self) -> Tensor:
        """Return the sums over all ranks; waits for them."""
        sums = self.sums.clone()
        if sums.numel() and torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
        return sums


class Ratios(DeviceSums):
    """Metrics of one evaluation, each a ratio of two sums.

    torchmetrics does this and more, but takes two to four seconds to import; a task may return its metrics
    instead. The functions in `ratios` compute the terms of a metric from a batch's outputs and targets.
    """

    def __init__(self, **ratios: Callable[[Tensor, Tensor], RatioTerms]) -> None:
        super().__init__(ratios, len(ratios), 2)
        self._ratios = ratios

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        for sums, parts_of in zip(self.sums, self._ratios.values(), strict=True):
            for place, part in zip(sums, parts_of(outputs, targets), strict=True):
                place += part

    def compute(self) -> dict[str, Tensor]:
        """Return the metrics over all batches of all ranks, 0-d; 0 without items. Waits for all ranks."""
        dividends, divisors = self.over_ranks().unbind(1)
        values = torch.where(divisors > 0, dividends / divisors, 0.0)
        return dict(zip(self._ratios, values, strict=True))


def update_metrics(metrics: Any, *given: Any, **named: Any) -> None:
    """Update any metrics, in float64 if outputs and targets are floats: squares of large values need it.

    Metrics with float32 values of their own, such as a network's weights, receive float32.
    """
    if not given or not all(isinstance(part, Tensor) and part.is_floating_point() for part in given):
        metrics.update(*given, **named)
        return
    dtype = devices.sum_dtype(given[0].device)
    try:
        metrics.update(*(part.to(dtype) for part in given), **named)
    except RuntimeError:
        metrics.update(*(part.float() for part in given), **named)


def placed(metrics: Any, device: torch.device) -> Any:
    """Move new metrics to `device`; those of torchmetrics then sum in float64."""
    metrics = metrics.to(device)
    for part in getattr(metrics, "modules", tuple)():
        states = getattr(part, "metric_state", dict[str, Any]()).values()
        sums = any(isinstance(state, Tensor) and state.is_floating_point() for state in states)
        if sums and not any(True for _ in part.parameters()):
            part.set_dtype(devices.sum_dtype(device))
    return metrics


def take_kinds(metrics: Any, others: Any) -> None:
    """Give the empty lists of samples in `metrics` the types of those in `others`.

    Ranks exchange these lists, and must agree on their types.
    """
    pairs = zip(*(getattr(each, "modules", tuple)() for each in (metrics, others)), strict=True)
    for part, other in pairs:
        for name, state in getattr(other, "metric_state", dict[str, Any]()).items():
            if isinstance(state, list):
                setattr(part, name, [rows[:0] for rows in state])


def accuracy(outputs: Tensor, targets: Tensor, top_k: int = 1) -> RatioTerms:
    """Return how many targets are among the `top_k` most likely classes, and how many are not ignored.

    Args:
        outputs: (..., num_classes).
        targets: class indices (...); -100 is ignored.
    """
    if top_k == 1:
        hits = outputs.argmax(-1) == targets
    else:
        hits = outputs.topk(top_k, dim=-1).indices == targets[..., None]
    return hits.sum(), (targets != IGNORE_INDEX).sum()


top5_accuracy = partial(accuracy, top_k=5)


def label_accuracy(outputs: Tensor, targets: Tensor) -> RatioTerms:
    """Return the terms of the accuracy over all pairs of input and class, from logits and 0/1 targets."""
    return ((outputs > 0) == targets.bool()).sum(), targets.numel()


def label_f1(outputs: Tensor, targets: Tensor) -> RatioTerms:
    """Return the terms of the F1 score over all pairs of input and class, from logits and 0/1 targets."""
    chosen, wanted = outputs > 0, targets.bool()
    return 2 * (chosen & wanted).sum(), chosen.sum() + wanted.sum()


def absolute_error(outputs: Tensor, targets: Tensor) -> RatioTerms:
    """Return the terms of the mean absolute error; outputs have the shape of the targets."""
    return (outputs - targets).abs().sum(), targets.numel()
