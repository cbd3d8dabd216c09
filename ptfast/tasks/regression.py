"""Numbers per input: squared error, with the absolute error as a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F

from ptfast.run import Metrics
from ptfast.tasks.supervised import SupervisedTask

if TYPE_CHECKING:
    from torch import Tensor, nn


class Regression(SupervisedTask):
    """Squared error between outputs and targets, (batch,) or (batch, values), averaged over the values."""

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.mse_loss(as_targets(outputs, targets), targets.to(outputs.dtype), reduction="sum")
        return loss * (targets.shape[0] / max(targets.numel(), 1))

    def metrics(self) -> Metrics:
        """Mean absolute error."""
        from torchmetrics import MetricCollection
        from torchmetrics.regression import MeanAbsoluteError

        return MetricCollection({"mae": MeanAbsoluteError()})

    def evaluate(self, model: nn.Module, data: Any, metrics: Metrics) -> tuple[Tensor, int | Tensor]:
        """Update the absolute error; return the sum of the losses and the number of samples."""
        inputs, targets = data
        outputs = model(inputs)
        metrics.update(as_targets(outputs, targets).float().contiguous(), targets.float())
        return self.evaluation_loss_sum(outputs, targets), self.num_items(targets)

    def predict(self, model: nn.Module, inputs: Any) -> list[dict[str, Any]]:
        """The value of each input, or its values where there are several."""
        outputs = model(inputs).float()
        rows = outputs.reshape(outputs.shape[0], -1).tolist()
        return [{"value": row[0] if len(row) == 1 else row} for row in rows]


def as_targets(outputs: Tensor, targets: Tensor) -> Tensor:
    """Outputs in the targets' shape: (batch, 1) against (batch,) would broadcast to (batch, batch)."""
    return outputs.reshape(targets.shape)
