"""Cross entropy of a linear layer's output, computed for some tokens at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ptfast.tasks.token_classification import token_cross_entropy

FEWEST_TOKENS, MOST_TOKENS = 64, 1024
"""Limits of a chunk, which else has as many tokens as the layer has inputs: its logits are then as large as
the weights."""


class ChunkedCrossEntropy(torch.autograd.Function):
    """The cross entropy of `hidden @ weight.T` against `targets`, summed over the tokens that count.

    Forward takes the gradients of each chunk with its loss, so that its logits can be dropped at once. Loss
    and gradients are summed over the chunks in float32; products are in the type of `hidden`.

    Args:
        hidden: (tokens, width).
        weight: (classes, width); converted to the type of `hidden`.
        targets: (tokens,), class indices or `IGNORE_INDEX`.

    Returns:
        0-d tensor, float32 or wider.

    Cost: the three products of the plain way, and the weights' size in float32.
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
                part_loss = token_cross_entropy(logits.to(wide), labels)
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
