"""One class per input: cross entropy and accuracy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F

from ptfast.errors import DataError
from ptfast.run import DataInfo, Metrics

if TYPE_CHECKING:
    from torch import Tensor, nn


class Classification:
    """Cross entropy between logits (batch, num_classes) and class indices (batch,).

    Args:
        info: what the data says; `num_classes` is needed.
        label_smoothing: share of the target spread evenly over all classes, in [0, 1); in training only.
    """

    metric = "accuracy"
    mode = "max"

    def __init__(self, info: DataInfo, label_smoothing: float = 0.0) -> None:
        if not info.num_classes:
            raise DataError("D004", "the number of classes is not known", suggestion="Set data.num_classes")
        self.num_classes = info.num_classes
        self.class_names = info.class_names or tuple(str(index) for index in range(info.num_classes))
        self.label_smoothing = label_smoothing

    def count(self, data: Any, num_samples: int) -> int:
        """Samples of the micro-batch."""
        return num_samples

    def loss(self, model: nn.Module, data: Any) -> tuple[Tensor, int]:
        """Sum of the cross entropies, and the number of samples."""
        inputs, targets = data
        loss = F.cross_entropy(model(inputs), targets, reduction="sum", label_smoothing=self.label_smoothing)
        return loss, targets.shape[0]

    def metrics(self) -> Metrics:
        """Accuracy, and from 100 classes on also top-5 accuracy."""
        from torchmetrics import MetricCollection
        from torchmetrics.classification import MulticlassAccuracy

        def accuracy(top_k: int) -> MulticlassAccuracy:
            return MulticlassAccuracy(self.num_classes, top_k=top_k, average="micro", validate_args=False)

        collection = {"accuracy": accuracy(1)}
        if self.num_classes >= 100:
            collection["top5_accuracy"] = accuracy(5)
        return MetricCollection(dict(collection), compute_groups=False)

    def evaluate(self, model: nn.Module, data: Any, metrics: Metrics) -> tuple[Tensor, int]:
        """Update the accuracies; return the plain cross entropy, without label smoothing."""
        inputs, targets = data
        logits = model(inputs)
        metrics.update(logits, targets)
        return F.cross_entropy(logits, targets, reduction="sum"), targets.shape[0]

    def figures(self, loss: float, values: dict[str, float]) -> dict[str, float]:
        """The loss and the accuracies."""
        return {"loss": loss, **values}

    def predict(self, model: nn.Module, inputs: Any) -> list[dict[str, Any]]:
        """The likeliest class of each input with its probability, and the five likeliest."""
        probabilities = model(inputs).float().softmax(dim=-1)
        values, indices = probabilities.topk(min(5, self.num_classes), dim=-1)
        records: list[dict[str, Any]] = []
        for row, classes in zip(values.tolist(), indices.tolist(), strict=True):
            names = [self.class_names[index] for index in classes]
            records.append(
                {"class": names[0], "probability": row[0], "top": dict(zip(names, row, strict=True))}
            )
        return records
