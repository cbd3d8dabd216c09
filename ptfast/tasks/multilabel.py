"""Any number of classes per input: binary cross entropy, F1 score and accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptfast.core.protocols import DataInfo
from ptfast.core.sections.section import NotNegative
from ptfast.tasks.cross_entropy import Weights, check_own_loss, focus, read_weights
from ptfast.tasks.loss_functions import LossFunction
from ptfast.tasks.ratios import label_accuracy, label_f1
from ptfast.tasks.supervised import SupervisedTask, names_of_classes


class MultiLabel(SupervisedTask):
    """Binary cross entropy between logits and 0/1 targets (batch, num_classes), averaged over classes.

    The metrics are the F1 score and the accuracy over all pairs of input and class.

    Args:
        loss: replaces the binary cross entropy, see `SupervisedTask`.
        pos_weight: weight of each class where a sample has it: a list, or a mapping by name.
        focal_gamma: focal loss: a target of probability p has weight (1 - p) ** gamma.
    """

    metric = "f1"
    mode = "max"
    ratios: Mapping[str, Any] = {"f1": label_f1, "accuracy": label_accuracy}
    needs_classes = True
    class_dim = 0

    def __init__(
        self,
        info: DataInfo,
        loss: LossFunction | None = None,
        pos_weight: Weights | None = None,
        focal_gamma: NotNegative = 0.0,
    ) -> None:
        super().__init__(info, loss)
        check_own_loss(loss, pos_weight=pos_weight, focal_gamma=focal_gamma)
        self.pos_weight = read_weights(pos_weight, info, "task.pos_weight")
        self.focal_gamma = focal_gamma

    def aligned(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        return outputs, targets.to(outputs.dtype)

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._losses(outputs, targets).sum() / self.num_classes

    def sample_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._losses(outputs, targets).mean(1)

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        outputs, targets = self.aligned(outputs, targets)
        weight = None if self.pos_weight is None else self.pos_weight.to(outputs.dtype)
        losses_of = partial(F.binary_cross_entropy_with_logits, outputs, targets, reduction="none")
        losses = losses_of(pos_weight=weight)
        return losses * focus(losses_of(), self.focal_gamma) if self.focal_gamma else losses

    def predict(self, model: nn.Module, inputs: Any) -> list[dict[str, Any]]:
        """Return the classes of each input with a probability above 0.5, and all class probabilities."""
        class_names = names_of_classes(self.info)
        records: list[dict[str, Any]] = []
        for row in self.forward(model, inputs).float().sigmoid().tolist():
            probabilities = dict(zip(class_names, row, strict=True))
            chosen = [name for name, probability in probabilities.items() if probability > 0.5]
            records.append({"classes": chosen, "probabilities": probabilities})
        return records
