"""One class per input: cross entropy and accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ptfast.core.protocols import Metrics
from ptfast.tasks.cross_entropy import CrossEntropyTask
from ptfast.tasks.ratios import Ratios, accuracy, top5_accuracy
from ptfast.tasks.supervised import names_of_classes


class Classification(CrossEntropyTask):
    """Cross entropy between logits (batch, num_classes) and class indices (batch,), ignoring -100.

    The metrics are accuracy and, for 100 classes or more, top-5 accuracy.
    """

    metric = "accuracy"
    mode = "max"
    ratios: Mapping[str, Any] = {"accuracy": accuracy}

    def metrics(self) -> Metrics:
        top5 = {"top5_accuracy": top5_accuracy} if self.num_classes >= 100 else {}
        return Ratios(**self.ratios, **top5)

    def predict(self, model: nn.Module, inputs: Any) -> list[dict[str, Any]]:
        """Return the most likely class of each input with its probability, and the five most likely."""
        probabilities = self.forward(model, inputs).float().softmax(dim=-1)
        values, indices = probabilities.topk(min(5, self.num_classes), dim=-1)
        class_names = names_of_classes(self.info)
        records: list[dict[str, Any]] = []
        for row, classes in zip(values.tolist(), indices.tolist(), strict=True):
            names = [class_names[index] for index in classes]
            top = dict(zip(names, row, strict=True))
            records.append({"class": names[0], "probability": row[0], "top": top})
        return records
