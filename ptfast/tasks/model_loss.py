"""Models that compute their own loss, such as transformers models given labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ptfast.core.protocols import IGNORE_INDEX, DataInfo, Metrics
from ptfast.tasks.loss_functions import times
from ptfast.tasks.ratios import accuracy
from ptfast.tasks.supervised import SupervisedTask, names_of_classes


class ModelLossTask(SupervisedTask):
    """Calls the model with `labels`, and multiplies the mean loss it returns by the number of items.

    A batch is a mapping of the model's keywords including `labels`, or `(inputs, targets)`, where inputs are
    such a mapping without labels, token ids, or images. Two-dimensional integer labels are per token. Labels
    of -100 are ignored. For language modeling the model shifts labels by one.

    Args:
        by_position: pass inputs as the first argument, not by the keywords of transformers' models.
    """

    counts_samples = False
    has_outputs = False
    takes_mixed = False

    def __init__(self, info: DataInfo, by_position: bool = False) -> None:
        super().__init__(info)
        self.by_position = by_position
        if info.task == "classification":
            self.ratios = {"accuracy": accuracy, **self.ratios}

    def num_items(self, targets: Tensor) -> int | Tensor:
        per_sample, shifted = targets.dim() < 2, self.info.task == "language_modelling"
        if targets.is_floating_point() or (per_sample and not self.info.ignores_labels):
            return targets.shape[0]
        return ((targets[:, 1:] if shifted and not per_sample else targets) != IGNORE_INDEX).sum()

    def count(self, data: Any, num_samples: int) -> int | Tensor:
        if isinstance(data, Mapping):
            return self.num_items(data["labels"])
        _, labels = data
        return self.num_items(labels)

    def loss(self, model: nn.Module, data: Any) -> tuple[Tensor, int | Tensor]:
        """Return the model's mean loss times the number of items, or 0 without items; and that number."""
        return self._run(model, data)[2:]

    def outputs_of(self, given: Any) -> Any:
        return given

    def misfit(self, outputs: Any, data: Any) -> str | None:
        """Describe the outputs that the model should return; None if `outputs` fit."""
        wanted = ["loss", "logits"] if self.info.task == "classification" else ["loss"]
        try:
            fits = all(isinstance(_get(outputs, name), Tensor) for name in wanted)
        except (AttributeError, IndexError, KeyError):
            fits = False
        return None if fits else f"a mapping, object or tuple with {' and '.join(wanted)}"

    def evaluate(self, model: nn.Module, data: Any, metrics: Metrics) -> tuple[Tensor, int | Tensor]:
        output, labels, loss, num_items = self._run(model, data)
        if self.info.task == "classification":
            metrics.update(_get(output, "logits"), labels)
        return loss, num_items

    def predict(self, model: nn.Module, inputs: Any) -> list[dict[str, Any]]:
        """Return the most likely class of each input with its probability, or the model's logits."""
        output = model(inputs) if self.by_position else model(**self._keywords(inputs))
        if isinstance(output, Tensor):
            output = {"logits": output}
        logits = _get(output, "logits").float()
        if self.info.task != "classification":
            return [{"logits": row} for row in logits.tolist()]
        values, indices = logits.softmax(-1).max(-1)
        names = names_of_classes(self.info)
        pairs = zip(indices.tolist(), values.tolist(), strict=True)
        return [{"class": names[index], "probability": value} for index, value in pairs]

    def _run(self, model: nn.Module, data: Any) -> tuple[Any, Tensor, Tensor, int | Tensor]:
        """Return the model's output for a batch, the labels, the sum of the losses and the item count."""
        if isinstance(data, Mapping):
            output, labels = model(**data), data["labels"]
        else:
            inputs, labels = data
            given = ((inputs,), {}) if self.by_position else ((), self._keywords(inputs))
            output = model(*given[0], **given[1], labels=labels)
        num_items = self.num_items(labels)
        return output, labels, times(_get(output, "loss"), num_items), num_items

    def _keywords(self, inputs: Any) -> dict[str, Any]:
        if isinstance(inputs, Mapping):
            return {name: value for name, value in inputs.items() if name != "labels"}
        if self.info.kind == "image":
            return {"pixel_values": inputs}
        if self.info.pad_id is None:
            return {"input_ids": inputs}
        return {"input_ids": inputs, "attention_mask": (inputs != self.info.pad_id).long()}


def _get(output: Any, name: str) -> Tensor:
    """Return a field of a model's output, which is a mapping, an object, or a tuple of (loss, logits)."""
    if isinstance(output, Mapping):
        return output[name]
    if isinstance(output, tuple) and not hasattr(output, name):
        return output[("loss", "logits").index(name)]
    return getattr(output, name)
