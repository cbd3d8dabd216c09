"""Attention as the models of sequences compute it, by the kernel that is quickest where they run."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_PLAIN_LENGTH = 256
"""Longest sequence for which plain matrix products beat the fused attention kernel on a CPU."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of each position to those that it may see.

    This is torch's fused kernel, except for short bfloat16 sequences on a CPU: there its backward pass is
    slow, and two batched matrix products around a softmax take a quarter of its time at 128 tokens,
    half at 256.

    Args:
        query, key, value: (batch, heads, length, head_width).
        mask: what may be seen, bool, of a shape that broadcasts to (batch, heads, length, length); None for
            everything. Every position must see something.
        causal: without a mask: each position sees itself and those before it.
        dropout: probability of zeroing an attention weight, in [0, 1).
    """
    batch, heads, length, width = query.shape
    if query.device.type != "cpu" or query.dtype != torch.bfloat16 or length > MAX_PLAIN_LENGTH:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal and mask is None
        )
    query, key, value = (x.reshape(batch * heads, length, width) for x in (query, key, value))
    if mask is None:
        hidden = query.new_zeros(())
        if causal:
            hidden = query.new_full((length, length), float("-inf")).triu(1)
        scores = torch.baddbmm(hidden, query, key.transpose(1, 2), alpha=width**-0.5)
    else:
        scores = torch.bmm(query * width**-0.5, key.transpose(1, 2)).view(batch, heads, length, length)
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).view(-1, length, length)
    weights = F.dropout(scores.softmax(-1), dropout, training=dropout > 0)
    return torch.bmm(weights, value).view(batch, heads, length, width)


def within_sequences(positions: Tensor) -> Tensor:
    """Mask of the tokens that each packed token may see: itself and the earlier ones of its sequence.

    Args:
        positions: (batch, length), of each token in its sequence; 0 where one begins.

    Returns:
        (batch, 1, length, length), bool.
    """
    sequences = (positions == 0).cumsum(1)
    return (sequences[:, :, None] == sequences[:, None, :]).tril()[:, None]
