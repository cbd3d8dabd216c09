"""Any number of classes per input: binary cross entropy, F1 score and accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptfast.tasks.ratios import label_accuracy, label_f1
from ptfast.tasks.supervised import SupervisedTask, names_of_classes


class MultiLabel(SupervisedTask):
    """Binary cross entropy between logits and 0/1 targets (batch, num_classes), averaged over classes.

    Figures are the F1 score and the accuracy over all pairs of input and class.

    Args:
        loss: replaces the binary cross entropy, see `SupervisedTask`.
    """

    metric = "f1"
    mode = "max"
    ratios: Mapping[str, Any] = {"f1": label_f1, "accuracy": label_accuracy}
    needs_classes = True
    class_dim = 0

    def aligned(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        return outputs, targets.to(outputs.dtype)

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.binary_cross_entropy_with_logits(*self.aligned(outputs, targets), reduction="sum")
        return loss / self.num_classes

    def sample_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.binary_cross_entropy_with_logits(*self.aligned(outputs, targets), reduction="none")
        return losses.mean(1)

    def predict(self, model: nn.Module, inputs: Any) -> list[dict[str, Any]]:
        """The classes of each input that are likelier than not, and every class's probability."""
        class_names = names_of_classes(self.info)
        records: list[dict[str, Any]] = []
        for row in self.forward(model, inputs).float().sigmoid().tolist():
            probabilities = dict(zip(class_names, row, strict=True))
            chosen = [name for name, probability in probabilities.items() if probability > 0.5]
            records.append({"classes": chosen, "probabilities": probabilities})
        return records
