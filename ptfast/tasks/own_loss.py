"""Models that compute their own loss, as those of transformers do when they are given labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ptfast.core.protocols import IGNORE_INDEX, DataInfo, Metrics
from ptfast.tasks.ratios import Ratios, accuracy
from ptfast.tasks.supervised import names_of_classes


class OwnLoss:
    """Calls the model with `labels` and takes the mean loss it returns times the items that count.

    A batch is a mapping of the model's keywords with `labels` among them, or `(inputs, targets)`, where
    inputs are such a mapping without labels, token ids, or images. Integer labels of two dimensions are one
    per token. Labels of -100 do not count. For language modelling the model shifts them by one.
    """

    metric = "loss"
    mode = "min"
    counts_samples = False

    def __init__(self, info: DataInfo) -> None:
        self.info = info
        self.shifted = info.task == "language_modelling"

    def count(self, data: Any, num_samples: int) -> int | Tensor:
        return self._num_items(self._keywords(data)["labels"])

    def loss(self, model: nn.Module, data: Any) -> tuple[Tensor, int | Tensor]:
        """The model's mean loss times the number of items, and that number. Of no items the sum is 0."""
        keywords = self._keywords(data)
        return self._sum(model(**keywords), keywords["labels"])

    def misfit(self, outputs: Any, data: Any) -> str | None:
        """Describe what a model should return, where `outputs` are not it."""
        wanted = ["loss", "logits"] if self.info.task == "classification" else ["loss"]
        try:
            fits = all(isinstance(_get(outputs, name), Tensor) for name in wanted)
        except (AttributeError, IndexError, KeyError):
            fits = False
        return None if fits else f"a mapping, object or tuple with {' and '.join(wanted)}"

    def metrics(self) -> Metrics:
        return Ratios(accuracy=accuracy) if self.info.task == "classification" else Ratios()

    def evaluate(self, model: nn.Module, data: Any, metrics: Metrics) -> tuple[Tensor, int | Tensor]:
        keywords = self._keywords(data)
        output = model(**keywords)
        if self.info.task == "classification":
            metrics.update(_get(output, "logits"), keywords["labels"])
        return self._sum(output, keywords["labels"])

    def figures(self, loss: float, values: dict[str, float]) -> dict[str, float]:
        return {"loss": loss, **values}

    def predict(self, model: nn.Module, inputs: Any) -> list[dict[str, Any]]:
        """The likeliest class of each input with its probability, or the model's plain outputs."""
        logits = _get(model(**self._inputs(inputs)), "logits").float()
        if self.info.task != "classification":
            return [{"logits": row} for row in logits.tolist()]
        values, indices = logits.softmax(-1).max(-1)
        names = names_of_classes(self.info)
        pairs = zip(indices.tolist(), values.tolist(), strict=True)
        return [{"class": names[index], "probability": value} for index, value in pairs]

    def _keywords(self, data: Any) -> dict[str, Any]:
        if isinstance(data, Mapping):
            return dict(data)
        inputs, targets = data
        return {**self._inputs(inputs), "labels": targets}

    def _inputs(self, inputs: Any) -> dict[str, Any]:
        if isinstance(inputs, Mapping):
            return {name: value for name, value in inputs.items() if name != "labels"}
        if self.info.kind == "image":
            return {"pixel_values": inputs}
        if self.info.pad_id is None:
            return {"input_ids": inputs}
        return {"input_ids": inputs, "attention_mask": (inputs != self.info.pad_id).long()}

    def _num_items(self, labels: Tensor) -> int | Tensor:
        per_sample = labels.dim() < 2
        if labels.is_floating_point() or (per_sample and not self.info.ignores_labels):
            return labels.shape[0]
        return ((labels[:, 1:] if self.shifted and not per_sample else labels) != IGNORE_INDEX).sum()

    def _sum(self, output: Any, labels: Tensor) -> tuple[Tensor, int | Tensor]:
        mean, num_items = _get(output, "loss"), self._num_items(labels)
        if isinstance(num_items, int):
            return mean * num_items, num_items
        return (mean * num_items).where(num_items > 0, 0.0), num_items


def _get(output: Any, name: str) -> Tensor:
    """A field of a model's output, which is a mapping, an object, or a tuple of (loss, logits)."""
    if isinstance(output, Mapping):
        return output[name]
    if isinstance(output, tuple) and not hasattr(output, name):
        return output[("loss", "logits").index(name)]
    return getattr(output, name)
