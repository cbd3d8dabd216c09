"""Layers that models share: attention with the fastest kernel, transformer blocks, stochastic depth."""

from __future__ import annotations

import inspect
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

varlen_attn: Any = None
"""Torch's causal attention over sequences of unequal length, once `load_varlen_attention` has found it."""
MAX_PLAIN_LENGTH = 256
"""Longest sequence for which plain matrix products beat the fused attention kernel on a CPU."""
MIN_MEAN_LENGTH = 32
"""Smallest mean length of packed sequences for `varlen_attn` to pay off: it pads each to 128 in places."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | SequenceStarts | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """Return the attention of `query`, `key` and `value`, each (batch, heads, length, head_width).

    This is torch's fused kernel, except for short bfloat16 sequences on a CPU: there its backward pass is
    slow, and two batched matrix products around a softmax take a quarter of its time at 128 tokens,
    half at 256.

    Args:
        mask: bool, True where a position may attend; broadcasts to (batch, heads, length, length). Or the
            starts of packed sequences (`packed_mask`). None for no mask. No row may be all False.
        causal: without a mask, let each position attend only to itself and earlier ones.
    """
    batch, heads, length, width = query.shape
    if isinstance(mask, SequenceStarts):
        # Views of one projection, joined end to end without a copy.
        rows = (part.transpose(1, 2).flatten(0, 1) for part in (query, key, value))
        ends, longest = mask
        attended = varlen_attn(*rows, ends, ends, longest, longest)
        return attended.unflatten(0, (batch, length)).transpose(1, 2)
    if query.device.type != "cpu" or query.dtype != torch.bfloat16 or length > MAX_PLAIN_LENGTH:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal and mask is None
        )
    query, key, value = (x.reshape(batch * heads, length, width) for x in (query, key, value))
    if mask is None:
        hidden = query.new_full((length, length), float("-inf")).triu(1) if causal else query.new_zeros(())
        scores = torch.baddbmm(hidden, query, key.transpose(1, 2), alpha=width**-0.5)
    else:
        scores = torch.bmm(query * width**-0.5, key.transpose(1, 2)).view(batch, heads, length, length)
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).view(-1, length, length)
    weights = F.dropout(scores.softmax(-1), dropout, training=dropout > 0)
    return torch.bmm(weights, value).view(batch, heads, length, width)


def within_sequences(positions: Tensor) -> Tensor:
    """Return the causal mask within packed sequences: (batch, 1, length, length), bool.

    `positions`, (batch, length), are the positions of tokens in their sequences; 0 where one begins.
    """
    sequences = (positions == 0).cumsum(1)
    return (sequences[:, :, None] == sequences[:, None, :]).tril()[:, None]


class SequenceStarts(NamedTuple):
    """Starts of packed sequences, for a kernel that computes attention only within each of them."""

    starts: Tensor
    """int32: index of each sequence's first token among all rows, padded with the number of tokens."""
    longest: int
    """Upper bound of the tokens in a sequence."""


def load_varlen_attention() -> None:
    """Import the kernel that `packed_mask` may choose; call this before training: it loads the compiler."""
    global varlen_attn
    with suppress(ImportError):  # before torch 2.10
        from torch.nn.attention import varlen

        # The argument has another name in torch 2.10.
        windowed = "window_size" in inspect.signature(varlen.varlen_attn).parameters
        causal: dict[str, Any] = {"window_size": (-1, 0)} if windowed else {"is_causal": True}
        varlen_attn = partial(varlen.varlen_attn, **causal)


def packed_mask(positions: Tensor, num_sequences: int, block: Block) -> Tensor | SequenceStarts:
    """Return the causal mask within packed sequences, in the form that suits `block` and the device.

    On NVIDIA GPUs since Ampere, in half precision and without dropout, torch's kernel for sequences of
    unequal length takes their starts: its work grows with the squares of their lengths instead of the rows',
    and there is no mask to read. Elsewhere, and in torch 2.9, this is a mask (`within_sequences`).

    Args:
        positions: (batch, length), of tokens in their sequences; 0 where one begins.
        num_sequences: upper bound of their number, so that the host need not count them; 0 if unknown.

    Source: Dao 2023, "FlashAttention-2", arXiv:2307.08691; torch.nn.attention.varlen.
    """
    long_enough = num_sequences * MIN_MEAN_LENGTH <= positions.numel()
    if not (num_sequences and long_enough and _has_varlen_kernel(positions.device, block)):
        return within_sequences(positions)
    numbers = torch.arange(1, num_sequences + 2, device=positions.device)
    started = (positions.flatten() == 0).cumsum(0)
    return SequenceStarts(torch.searchsorted(started, numbers, out_int32=True), positions.shape[1])


def _has_varlen_kernel(device: torch.device, block: Block) -> bool:
    """Return True if `varlen_attn` supports the attention of `block` on `device`."""
    if device.type != "cuda" or varlen_attn is None or torch.version.hip is not None:
        return False
    weight = block.attention_in.weight
    autocast = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if autocast else weight.dtype
    head_width = weight.shape[1] // block.heads
    return (
        dtype in (torch.float16, torch.bfloat16)
        and not (block.training and block.attention_dropout)
        and head_width % 8 == 0
        and head_width <= 256
        and torch.cuda.get_device_properties(device).major >= 8
    )


class Block(nn.Module):
    """Self-attention and a feed-forward layer, each behind a norm and added to its input.

    `dropout` applies to both branches and, if `causal`, to attention. With `causal`, a token attends only to
    itself and earlier ones, and no linear layer has a bias.
    """

    def __init__(
        self, width: int, heads: int, dropout: float, drop_path: float = 0.0, *, causal: bool = True
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.drop_path = heads, causal, drop_path
        self.attention_dropout = dropout if causal else 0.0
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=not causal)
        self.attention_out = nn.Linear(width, width, bias=not causal)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width, bias=not causal)
        self.feed_out = nn.Linear(4 * width, width, bias=not causal)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | SequenceStarts | None = None) -> Tensor:
        batch, length, width = x.shape
        heads = self.attention_in(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        # Split before transposing, so that gradients are joined in the order in which they are read.
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(2))
        dropout = self.attention_dropout if self.training else 0.0
        attended = attention(query, key, value, mask=mask, causal=self.causal, dropout=dropout)
        attended = attended.transpose(1, 2).reshape(batch, length, width)
        x = x + self._branch(self.attention_out(attended))
        return x + self._branch(self.feed_out(F.gelu(self.feed_in(self.feed_norm(x)))))

    def _branch(self, x: Tensor) -> Tensor:
        x = self.dropout(x)
        return drop_path(x, self.drop_path) if self.drop_path and self.training else x


def drop_path(x: Tensor, rate: float) -> Tensor:
    """Zero a residual branch's output `x`, (batch, ...), for random samples, and scale it up for the rest.

    Samples train networks of different depths, which shortens the path of gradients and regularizes;
    evaluation uses the full depth. `rate`, in [0, 1), is the probability of a zero; other samples are divided
    by 1 - rate, which preserves the mean.

    Cost: one product of the size of `x`; no arithmetic is skipped.
    Source: Huang, Sun, Liu, Sedra, Weinberger 2016, arXiv:1603.09382, who draw once per batch. Here, each
        sample is drawn, as in timm's DropPath and torchvision's StochasticDepth in mode `row`.
    """
    kept = x.new_empty((x.shape[0], *[1] * (x.dim() - 1))).bernoulli_(1 - rate)
    return x * kept.div_(1 - rate)


def rate_of_block(index: int, depth: int, rate: float) -> float:
    """Return the drop-path rate of block `index` (from 0) of `depth`, rising linearly to `rate` at the last.

    Early blocks are dropped least, because all later blocks use their features (section 4 of the paper).
    """
    return rate * (index + 1) / depth
