"""Adapt the config's loss functions: return a sum over items, and the count or weight to divide it by."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import loss as losses

from ptfast.core import devices
from ptfast.core.errors import ConfigError, described, name_of
from ptfast.core.protocols import IGNORE_INDEX

LossFunction = Callable[[Tensor, Tensor], Any]
"""Takes outputs and targets; returns the mean loss, a loss per sample or element, or `(sum, weight)`."""
CLASS_LOSSES = {"CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss"}
"""Torch losses whose mean divides by the class weights of the targets that are not ignored."""
ELEMENT_WEIGHTS = {"l1_loss", "mse_loss", "huber_loss"}
"""Functions with a `weight` per element, whose mean divides by the sum of the weights."""
KEY = "task.loss._target_"
FEW_SAMPLES, FEW_NUMBERS = 64, 2**22
"""Maximum number of samples, and of values in their outputs, for checking the mean of a user's loss."""
CLOSE = 1e-3
"""Relative difference that rounding cannot explain."""


class UserLoss:
    """A user's loss function. Its first result shows the kind of value it returns, which must not change."""

    def __init__(self, loss: LossFunction, task: Any) -> None:
        self._loss, self._task, self._items_of = loss, task, task.num_items
        self._per_sample = task.counts_samples
        self.returns: str | None = None
        """`mean`, `elements` (the loss of each target), `samples` or `pair` (sum and weight)."""

    def num_items(self, targets: Tensor) -> Any:
        """Return the divisor of the sum over `targets`; None if only the function knows it."""
        if self.returns == "pair":
            return None
        return len(targets) if self.returns == "samples" else self._items_of(targets)

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.sums(outputs, targets)[0]

    def sums(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
        """Return the sum of the item losses, and the items' number or weight."""
        value = self._call(outputs, targets)
        if isinstance(value, tuple):
            total, weight = value
            if isinstance(weight, Tensor):  # sums in float64 are the same in any order
                weight = weight.detach().to(devices.sum_dtype(weight.device))
            return total, weight
        num_items = self.num_items(targets)
        if not value.dim():
            return times(value, num_items), num_items
        scale = len(value) / max(value.numel(), 1) if self._per_sample and value.dim() > 1 else None
        return value.sum() if scale is None else value.sum() * scale, num_items

    def of_samples(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each sample's part of the sum, (batch,); vectorized if the function returns one number."""
        value = self._call(outputs, targets) if self.returns not in ("mean", "pair") else None
        if not isinstance(value, Tensor) or not value.dim():
            return self._task.losses_one_by_one(outputs, targets)
        rows = value.reshape(len(value), -1)
        return rows.mean(1) if self._per_sample else rows.sum(1)

    def _call(self, outputs: Tensor, targets: Tensor) -> Any:
        outputs, targets = self._task.aligned(outputs, targets)
        value = self._loss(outputs, targets)
        returns = None
        if isinstance(value, Tensor):
            kinds = {targets.shape[:1]: "samples", targets.shape: "elements", (): "mean"}
            returns = kinds.get(value.shape)
        elif isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Tensor):
            single = isinstance(value[1], (int, float)) or (
                isinstance(value[1], Tensor) and not value[1].dim()
            )
            returns = "pair" if single and not value[0].dim() else None
        if returns is None or self.returns not in (None, returns):
            given = f"gives {described(value)} for targets of shape ({', '.join(map(str, targets.shape))})"
            what = f"{given}, where a Tensor is expected: their mean loss, (), or the loss of each"
            hint = "Have it always return one of those, or (sum, weight)"
            raise ConfigError("C017", what, key=KEY, value=name_of(self._loss), suggestion=hint)
        self.returns = returns
        self._task.counts_samples = returns == "samples" or (returns != "pair" and self._per_sample)
        return value

    @torch.no_grad()
    def difference_of_parts(self, outputs: Any, targets: Any) -> str | None:
        """Describe how far the loss of a batch is from the mean over its parts; None if they agree.

        The batch has some samples of this one, and half of them again with other targets, so that its parts
        differ. Cost: four calls of the loss; the host waits for the device.
        """
        if self.returns != "mean":
            return None
        outputs, targets = self._task.aligned(outputs, targets)
        if not isinstance(outputs, Tensor):
            return None
        outputs = outputs.detach().to(torch.promote_types(outputs.dtype, torch.float32))
        num_samples = min(FEW_SAMPLES, max(1, FEW_NUMBERS // max(1, outputs[:1].numel())), len(outputs))
        outputs, targets = outputs[:num_samples], targets[:num_samples]
        half = max(1, num_samples // 2)
        parts = (outputs, targets), (outputs[:half], self._others(targets)[:half])
        whole = tuple(torch.cat(both) for both in zip(*parts, strict=True))
        try:
            loss = copy.deepcopy(self._loss)
            with torch.random.fork_rng([outputs.device] if outputs.is_cuda else []):
                # In-place changes must not affect the tensors of the step.
                value, again, *means = (
                    float(loss(*(t.clone() for t in part))) for part in (whole, whole, *parts)
                )
        except Exception:
            return None  # it does not accept this batch
        first, second = (float(self._items_of(part[1])) for part in parts)
        mean = (means[0] * first + means[1] * second) / max(first + second, 1)
        # A loss that draws random numbers cannot be compared.
        if value != again or not abs(value - mean) > CLOSE * max(abs(value), abs(mean)) + 1e-6:
            return None
        return f"the loss of a batch is not the mean over its parts ({value:.4g} for {mean:.4g})"

    def _others(self, targets: Tensor) -> Tensor:
        """Return other targets of the same kind; ignored ones are unchanged."""
        if targets.is_floating_point():
            return targets.flip(0)
        num_classes = self._task.num_classes if self._task.class_dim else 2
        return ((targets + 1) % num_classes).where((targets >= 0) & (targets < num_classes), targets)


class TorchLoss(UserLoss):
    """A torch loss, whose arguments determine the divisor of its mean.

    Args:
        loss: reduces to a mean or a sum.
        each: the same loss without a reduction.
        arguments: the arguments of both; tensors are on the device of the targets.
        by_class: whether targets are classes, which may have weights.
    """

    def __init__(
        self,
        loss: LossFunction,
        task: Any,
        each: LossFunction,
        arguments: Mapping[str, Any],
        by_class: bool,
    ) -> None:
        super().__init__(loss, task)
        self._each, self._reduction = each, arguments["reduction"]
        self._weight: Tensor | None = arguments.get("weight")
        self._ignored = arguments.get("ignore_index")
        self._selects = (
            by_class and task.class_dim != 0 and (self._weight is not None or self._ignored != IGNORE_INDEX)
        )
        task.counts_samples = task.counts_samples and not self._selects
        task.averages = self._reduction != "sum"
        self._per_sample = task.counts_samples and self._reduction == "mean"

    def num_items(self, targets: Tensor) -> Any:
        if not self._selects:
            return self._items_of(targets)
        if targets.is_floating_point():  # (batch, classes, ...): class probabilities
            return targets[:, 0].numel()
        return target_weights(targets, self._weight, self._ignored).sum()

    def sums(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
        if self._selects:
            return self._call(outputs, targets).sum(), self.num_items(targets)
        num_items = self.num_items(targets)
        value = self._loss(*self._task.aligned(outputs, targets))
        return (value if self._reduction == "sum" else times(value, num_items)), num_items

    def _call(self, outputs: Tensor, targets: Tensor) -> Any:
        return self._each(*self._task.aligned(outputs, targets))


def target_weights(targets: Tensor, weight: Tensor | None, ignored: int | None) -> Tensor:
    """Return the weight of each target in torch's mean: that of its class (default 1), or 0 if ignored."""
    counted = targets.long() != ignored
    if weight is None:
        return counted
    weight = weight.to(devices.sum_dtype(targets.device))
    return weight[targets.where(counted, 0).long()] * counted


def times(mean: Tensor, num_items: Any) -> Tensor:
    """Return the sum of `num_items` losses with this mean; without items 0, not NaN."""
    if isinstance(num_items, int):
        return mean * num_items
    return (mean * num_items).where(num_items > 0, 0.0)


def adapt_loss(loss: Any, task: Any) -> UserLoss:
    """Adapt `loss`, a function of outputs and targets, to `task`; this may change the items it counts.

    Raises:
        ConfigError: C017 for a `loss` with other arguments, and later for an unexpected result.
    """
    with contextlib.suppress(ValueError):  # it has no signature
        try:
            inspect.signature(loss).bind(None, None)
        except TypeError as error:
            what = f"cannot be called with outputs and targets: {error}"
            raise ConfigError("C017", what, key=KEY, value=name_of(loss)) from error
    if isinstance(loss, nn.Module):
        kind = next((k for k in type(loss).__mro__ if getattr(losses, k.__name__, None) is k), None)
        if kind is None or type(loss).forward is not kind.forward:
            return UserLoss(loss, task)
        each, name = copy.copy(loss), kind.__name__
        each.__dict__["reduction"] = "none"
        arguments = {**vars(loss), **loss._buffers}
    else:
        function, given = loss, {}
        if isinstance(loss, functools.partial) and not loss.args:
            function, given = loss.func, loss.keywords
        name = getattr(function, "__name__", "")
        weighs_elements = name in ELEMENT_WEIGHTS and "weight" in given
        if getattr(F, name, None) is not function or weighs_elements:
            return UserLoss(loss, task)
        parameters = inspect.signature(function).parameters
        arguments = {key: parameter.default for key, parameter in parameters.items()} | given
        each = functools.partial(function, **{**given, "reduction": "none"})
    # The old keywords `reduce` and `size_average` override `reduction`.
    old = arguments.get("reduce") is not None or arguments.get("size_average") is not None
    if old or arguments.get("reduction") not in ("mean", "batchmean", "sum"):
        return UserLoss(loss, task)
    return TorchLoss(loss, task, each, arguments, name in CLASS_LOSSES)
