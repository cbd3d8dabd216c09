"""Language modeling: cross entropy of the next token, perplexity and bits per byte."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ptfast.core.protocols import IGNORE_INDEX, DataInfo, LinearLogits
from ptfast.tasks.loss_functions import LossFunction
from ptfast.tasks.token_classification import TokenClassification

FEWEST_TOKENS, MOST_TOKENS = 64, 1024
"""Limits of a chunk's size. Between them, a chunk has as many tokens as the layer has inputs, so its logits
are as large as the weights."""


class ChunkedCrossEntropy(torch.autograd.Function):
    """The cross entropy of `hidden @ weight.T` against `targets`, summed over the tokens not ignored.

    Forward computes the gradients of each chunk with its loss, so its logits are freed at once. Loss and
    gradients are summed over the chunks in float32; matrix products use the dtype of `hidden`. Shapes are
    (tokens, width), (classes, width) and (tokens,); the loss is 0-d, in float32 or wider.

    Cost: the three matrix products of the usual computation, and a float32 buffer of the weights' size.
    Source: Wijmans et al. 2024, arXiv:2411.09009.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        wide, matrix = torch.promote_types(hidden.dtype, torch.float32), weight.to(hidden.dtype)
        loss = hidden.new_zeros((), dtype=wide)
        for_hidden, for_weight = hidden.to(wide, copy=True), torch.zeros_like(weight, dtype=wide)
        size = min(max(hidden.shape[1], FEWEST_TOKENS), MOST_TOKENS)
        parts = zip(hidden.split(size), targets.split(size), for_hidden.split(size), strict=True)
        for part, labels, for_part in parts:
            logits = (part @ matrix.T).requires_grad_()
            with torch.enable_grad():
                part_loss = F.cross_entropy(
                    logits.to(wide), labels, ignore_index=IGNORE_INDEX, reduction="sum"
                )
            (slopes,) = torch.autograd.grad(part_loss, logits)
            loss += part_loss.detach()
            for_part.copy_(slopes @ matrix)
            for_weight += slopes.T @ part
        ctx.types = hidden.dtype, weight.dtype
        ctx.save_for_backward(for_hidden, for_weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        for_hidden, for_weight = (sums * gradients[0] for sums in ctx.saved_tensors)
        return for_hidden.to(ctx.types[0]), for_weight.to(ctx.types[1]), None


MAX_EXPONENT = 700.0
"""Above about this exponent, `math.exp` overflows."""


class LanguageModelling(TokenClassification):
    """Cross entropy between logits (batch, length, vocab_size) and next tokens (batch, length), in nats."""

    metric = "loss"
    mode = "min"
    ratios: Mapping[str, Any] = {}
    needs_classes = False
    class_dim = -1
    takes_linear_logits = True

    def __init__(self, info: DataInfo, loss: LossFunction | None = None) -> None:
        super().__init__(info, loss)
        self.num_classes = info.vocab_size or 1
        if loss is not None:
            self.takes_linear_logits = False

    def num_items(self, targets: Tensor) -> int | Tensor:
        if self.info.pad_id is None and not self.info.ignores_labels:
            # Every token counts: nothing needs to be summed on the device.
            return targets.numel()
        return super().num_items(targets)

    def loss_sum(self, outputs: Tensor | LinearLogits, targets: Tensor) -> Tensor:
        if not isinstance(outputs, LinearLogits):
            return super().loss_sum(outputs, targets)
        hidden, weight = outputs.hidden.flatten(0, -2), outputs.weight
        return ChunkedCrossEntropy.apply(hidden, weight, targets.flatten())  # pyright: ignore[reportReturnType]

    def log_values(self, loss: float, values: dict[str, float]) -> dict[str, float]:
        """Add the perplexity, and bits per byte or per character if the data allows it."""
        found = {"loss": loss, **values, "perplexity": math.exp(min(loss, MAX_EXPONENT))}
        bits_per_token = loss / math.log(2)
        if self.info.extra.get("tokenizer", {}).get("kind") == "characters":
            found["bits_per_character"] = bits_per_token
        if self.info.token_bytes:
            found["bits_per_byte"] = bits_per_token / self.info.token_bytes
        return found

    def predict(self, model: nn.Module, inputs: Any) -> list[dict[str, Any]]:
        """Score each sequence: its loss in nats per token, from the second token on."""
        tokens, targets = inputs[:, :-1], inputs[:, 1:]
        if not targets.numel():
            return [{"loss": None, "perplexity": None, "tokens": 0} for _ in inputs]
        if self.info.pad_id is not None:
            targets = targets.masked_fill(targets == self.info.pad_id, IGNORE_INDEX)
        logits, labels = self.aligned(model(tokens).float(), targets)
        losses = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
        counts = (targets != IGNORE_INDEX).sum(-1)
        means = losses.view(targets.shape).sum(-1) / counts.clamp(min=1)
        records: list[dict[str, Any]] = []
        for loss, count in zip(means.tolist(), counts.tolist(), strict=True):
            perplexity = math.exp(min(loss, MAX_EXPONENT))
            known = {"loss": loss, "perplexity": perplexity} if count else {"loss": None, "perplexity": None}
            records.append({**known, "tokens": count})
        return records
