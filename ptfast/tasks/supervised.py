"""What the tasks that compare outputs with targets share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ptfast.run import IGNORE_INDEX, DataInfo, Metrics, Mixed
from ptfast.tasks.ratios import Ratios

if TYPE_CHECKING:
    from torch import Tensor, nn

LossFunction = Callable[["Tensor", "Tensor"], "Tensor"]


class SupervisedTask:
    """A batch of `(inputs, targets)`, one output per target, a loss that sums over items.

    A subclass gives `loss_sum`, `metrics` and `predict`. Where items are not samples it says so by
    `counts_samples`: then they are the targets that are not ignored.

    Args:
        info: what the data says.
        loss: replaces the task's own loss: a function of outputs and targets that returns their mean loss, or
            one loss per item.
    """

    metric = "loss"
    mode = "min"
    counts_samples = True
    """Whether every sample counts as one item, so that nothing needs counting in a step."""
    takes_mixed = True
    """Whether the targets of a training batch may be `Mixed`."""

    def __init__(self, info: DataInfo, loss: LossFunction | None = None) -> None:
        self.info = info
        if loss is not None:
            mean_loss = adapt_mean_loss(loss)
            self.loss_sum = lambda outputs, targets: mean_loss(
                *self.aligned(outputs, targets), self.num_items(targets)
            )
            self.evaluation_loss_sum = self.loss_sum

    def aligned(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets in the shapes and types that losses compare."""
        return outputs, targets

    def num_items(self, targets: Tensor) -> int | Tensor:
        """Items that the loss counts; on the device where they depend on the values."""
        return targets.shape[0] if self.counts_samples else (targets != IGNORE_INDEX).sum()

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum of the losses of the items."""
        raise NotImplementedError

    def evaluation_loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum of the losses of the items as evaluations report it."""
        return self.loss_sum(outputs, targets)

    def count(self, data: Any, num_samples: int) -> int | Tensor:
        """How many items the loss of a micro-batch is averaged over."""
        if self.counts_samples:
            return num_samples
        targets = data[1]
        return self.num_items(targets.targets if isinstance(targets, Mixed) else targets)

    def loss(self, model: nn.Module, data: Any) -> tuple[Tensor, int | Tensor]:
        """Sum of the losses and the number of items.

        Of mixed samples it is the loss of either target by its share. Partners are the same targets in
        another order, so that as many of them count.
        """
        inputs, targets = data
        outputs = model(inputs)
        if isinstance(targets, Mixed):
            targets, partners, share = targets
            loss = share * self.loss_sum(outputs, targets) + (1 - share) * self.loss_sum(outputs, partners)
        else:
            loss = self.loss_sum(outputs, targets)
        return loss, self.num_items(targets)

    def metrics(self) -> Metrics:
        """Fresh metrics of one evaluation."""
        return Ratios()

    def evaluate(self, model: nn.Module, data: Any, metrics: Metrics) -> tuple[Tensor, int | Tensor]:
        """Update the metrics; return the sum of the losses and the number of items."""
        inputs, targets = data
        outputs = model(inputs)
        metrics.update(outputs, targets)
        return self.evaluation_loss_sum(outputs, targets), self.num_items(targets)

    def figures(self, loss: float, values: dict[str, float]) -> dict[str, float]:
        """The loss and the metrics."""
        return {"loss": loss, **values}

    def predict(self, model: nn.Module, inputs: Any) -> list[dict[str, Any]]:
        """One record per input."""
        raise NotImplementedError


def full_precision(outputs: Tensor) -> Tensor:
    """Outputs of autocast in float32, in which losses and targets are exact enough; float64 stays."""
    return outputs if outputs.element_size() == 8 else outputs.float()


def adapt_mean_loss(loss: LossFunction) -> Callable[[Tensor, Tensor, int | Tensor], Tensor]:
    """A loss that averages over a micro-batch, as one that sums: micro-batches of any size then add up right.

    Args:
        loss: function of outputs and targets; returns the mean as a 0-d tensor, or one loss per item.

    Returns:
        A function of outputs, targets and the number of items they hold. Of no items the sum is 0, where a
        mean would be NaN.
    """

    def loss_sum(outputs: Tensor, targets: Tensor, num_items: int | Tensor) -> Tensor:
        value = loss(outputs, targets)
        if value.dim():
            return value.sum()
        if isinstance(num_items, int):
            return value * num_items
        return (value * num_items).where(num_items > 0, 0.0)

    functools.update_wrapper(loss_sum, loss, assigned=("__doc__",), updated=())
    return loss_sum
