"""One class per input: cross entropy and accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ptfast.core.protocols import DataInfo
from ptfast.core.sections.section import Fraction
from ptfast.tasks.loss_functions import LossFunction
from ptfast.tasks.ratios import accuracy, top5_accuracy
from ptfast.tasks.supervised import SupervisedTask, names_of_classes


class Classification(SupervisedTask):
    """Cross entropy between logits (batch, num_classes) and class indices (batch,), of which -100 is ignored.

    Figures are the accuracy, and from 100 classes on the top-5 accuracy.

    Args:
        loss: replaces the cross entropy, see `SupervisedTask`.
        label_smoothing: share of the target spread evenly over all classes, in [0, 1); in training only.
    """

    metric = "accuracy"
    mode = "max"
    ratios: Mapping[str, Any] = {"accuracy": accuracy}
    needs_classes = True
    class_dim = 1

    def __init__(
        self, info: DataInfo, loss: LossFunction | None = None, label_smoothing: Fraction = 0.0
    ) -> None:
        if info.ignores_labels:
            self.counts_samples = False
        super().__init__(info, loss)
        self.label_smoothing = label_smoothing
        if self.num_classes >= 100:
            self.ratios = {**self.ratios, "top5_accuracy": top5_accuracy}

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="sum", label_smoothing=self.label_smoothing)

    def sample_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        smoothing = self.label_smoothing
        losses = F.cross_entropy(outputs, targets, reduction="none", label_smoothing=smoothing)
        return losses.reshape(len(losses), -1).sum(1)

    def evaluation_loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="sum")

    def predict(self, model: nn.Module, inputs: Any) -> list[dict[str, Any]]:
        """The likeliest class of each input with its probability, and the five likeliest."""
        probabilities = self.forward(model, inputs).float().softmax(dim=-1)
        values, indices = probabilities.topk(min(5, self.num_classes), dim=-1)
        class_names = names_of_classes(self.info)
        records: list[dict[str, Any]] = []
        for row, classes in zip(values.tolist(), indices.tolist(), strict=True):
            names = [class_names[index] for index in classes]
            top = dict(zip(names, row, strict=True))
            records.append({"class": names[0], "probability": row[0], "top": top})
        return records
