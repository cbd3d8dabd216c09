"""The next token at each position: cross entropy, perplexity and bits per byte."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from ptfast.core.protocols import IGNORE_INDEX, LinearLogits
from ptfast.tasks.supervised import SupervisedTask
from ptfast.tasks.token_classification import token_cross_entropy

MAX_EXPONENT = 700.0
"""Just below where exp leaves the floating point numbers."""


class LanguageModelling(SupervisedTask):
    """Cross entropy between logits (batch, length, vocab_size) and next tokens (batch, length), in nats."""

    counts_samples = False
    takes_mixed = False

    def num_items(self, targets: Tensor) -> int | Tensor:
        if self.info.pad_id is None and not self.info.ignores_labels:
            # Every token counts: nothing needs to be summed on the device.
            return targets.numel()
        return super().num_items(targets)

    def aligned(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.flatten(0, -2), targets.flatten()

    def fitting_outputs(self, targets: Tensor) -> tuple[tuple[int, ...], int | None] | None:
        return (*targets.shape, self.info.vocab_size or 1), targets.dim()

    @property
    def takes_linear_logits(self) -> bool:
        """True: the loss of a training batch may be taken of `LinearLogits`."""
        return self.own_loss is None

    def misfit(self, outputs: Any, data: Any) -> str | None:
        return None if isinstance(outputs, LinearLogits) else super().misfit(outputs, data)

    def loss_sum(self, outputs: Tensor | LinearLogits, targets: Tensor) -> Tensor:
        if not isinstance(outputs, LinearLogits):
            return token_cross_entropy(outputs, targets)
        from ptfast.tasks.chunked_cross_entropy import ChunkedCrossEntropy

        hidden, weight = outputs.hidden.flatten(0, -2), outputs.weight
        return ChunkedCrossEntropy.apply(hidden, weight, targets.flatten())  # pyright: ignore[reportReturnType]

    def figures(self, loss: float, values: dict[str, float]) -> dict[str, float]:
        """Adds the perplexity, and bits per byte of text where the data says how long its tokens are."""
        figures = {"loss": loss, **values, "perplexity": math.exp(min(loss, MAX_EXPONENT))}
        bits_per_token = loss / math.log(2)
        if self.info.extra.get("tokenizer", {}).get("kind") == "characters":
            figures["bits_per_character"] = bits_per_token
        if self.info.token_bytes:
            figures["bits_per_byte"] = bits_per_token / self.info.token_bytes
        return figures

    def predict(self, model: nn.Module, inputs: Any) -> list[dict[str, Any]]:
        """Score each sequence: its loss in nats per token, from the second token on."""
        tokens, targets = inputs[:, :-1], inputs[:, 1:]
        if not targets.numel():
            return [{"loss": None, "perplexity": None, "tokens": 0} for _ in inputs]
        if self.info.pad_id is not None:
            targets = targets.masked_fill(targets == self.info.pad_id, IGNORE_INDEX)
        losses = token_cross_entropy(model(tokens).float(), targets, reduction="none").view(targets.shape)
        counts = (targets != IGNORE_INDEX).sum(-1)
        means = losses.sum(-1) / counts.clamp(min=1)
        records: list[dict[str, Any]] = []
        for loss, count in zip(means.tolist(), counts.tolist(), strict=True):
            perplexity = math.exp(min(loss, MAX_EXPONENT)) if count else None
            records.append({"loss": loss if count else None, "perplexity": perplexity, "tokens": count})
        return records
