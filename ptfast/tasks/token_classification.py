"""One class per token: cross entropy and accuracy over labeled tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ptfast.tasks.cross_entropy import CrossEntropyTask
from ptfast.tasks.ratios import accuracy
from ptfast.tasks.supervised import names_of_classes


class TokenClassification(CrossEntropyTask):
    """Cross entropy between logits (batch, length, num_classes) and class indices (batch, length).

    Tokens with a target of -100 are ignored. A batch in which all are ignored adds 0 to the loss.

    Args:
        loss: replaces the cross entropy, see `SupervisedTask`; gets (tokens, num_classes) and (tokens,).
    """

    metric = "accuracy"
    mode = "max"
    ratios: Mapping[str, Any] = {"accuracy": accuracy}
    class_dim = -1
    counts_samples = False
    takes_mixed = False

    def aligned(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.flatten(0, -2), targets.flatten()

    def predict(self, model: nn.Module, inputs: Any) -> list[dict[str, Any]]:
        """Return the class of each token with its probability."""
        class_names = names_of_classes(self.info)
        values, indices = self.forward(model, inputs).float().softmax(-1).max(-1)
        return [
            {"classes": [class_names[index] for index in classes], "probabilities": row}
            for classes, row in zip(indices.tolist(), values.tolist(), strict=True)
        ]
