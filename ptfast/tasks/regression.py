"""Regression: squared error, with the absolute error as a metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptfast.core.protocols import Mixed
from ptfast.tasks.ratios import absolute_error
from ptfast.tasks.supervised import SupervisedTask


class Regression(SupervisedTask):
    """Squared error between outputs and targets, (batch,) or (batch, values), averaged over the values.

    Args:
        loss: replaces the squared error, see `SupervisedTask`.
    """

    ratios: Mapping[str, Any] = {"mae": absolute_error}
    measures_aligned = True

    def aligned(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        # Outputs (batch, 1) against targets (batch,) would broadcast to (batch, batch).
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).reshape(targets.shape)
        return outputs, targets.to(outputs.dtype)

    def misfit(self, outputs: Any, data: Any) -> str | None:
        targets = data[1].targets if isinstance(data[1], Mixed) else data[1]
        if isinstance(outputs, Tensor) and outputs.is_floating_point() and outputs.numel() == targets.numel():
            return None
        return f"floats, as many as targets: ({', '.join(map(str, targets.shape))})"

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.mse_loss(*self.aligned(outputs, targets), reduction="sum")
        return loss * (targets.shape[0] / max(targets.numel(), 1))

    def sample_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.mse_loss(*self.aligned(outputs, targets), reduction="none")
        return losses.reshape(len(losses), -1).mean(1)

    def predict(self, model: nn.Module, inputs: Any) -> list[dict[str, Any]]:
        """Return the value of each input, or its values if there are several."""
        outputs = self.forward(model, inputs).float()
        rows = outputs.reshape(outputs.shape[0], -1).tolist()
        return [{"value": row[0] if len(row) == 1 else row} for row in rows]
