"""A decoder-only transformer for language modelling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptfast.errors import ConfigError
from ptfast.models.drop_path import drop_path, rate_of_block

MAX_PLAIN_LENGTH = 256
"""Longest sequence for which plain matrix products beat the fused attention kernel on a CPU."""


class Gpt(nn.Module):
    """Pre-norm decoder with learned positions and causal attention.

    Args:
        vocab_size: number of token ids, filled from the data.
        context_length: longest sequence in tokens, filled from the data.
        width: size of a token's vector.
        depth: number of blocks.
        heads: attention heads per block; must divide `width`.
        dropout: probability of zeroing an activation, in [0, 1).
        tied_head: share the token embedding with the output layer.
        drop_path: probability that a sample skips a branch of the last block in training, see
            `models.drop_path`.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        dropout: float = 0.0,
        tied_head: bool = False,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError("C005", f"does not divide model.width={width}", key="model.heads", value=heads)
        self.context_length = context_length
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Embedding(context_length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, heads, dropout, rate_of_block(index, depth, drop_path)) for index in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        if tied_head:
            self.head.weight = self.token_embedding.weight
        self._init_weights(depth)

    def _init_weights(self, depth: int) -> None:
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                # Each block adds two branches to the residual stream: keep its variance independent of depth.
                std = 0.02 / (2 * depth) ** 0.5 if name.endswith("out") else 0.02
                nn.init.normal_(module.weight, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids (batch, length) to logits of the next token (batch, length, vocab_size)."""
        length = tokens.shape[1]
        if length > self.context_length:
            raise ValueError(f"{length} tokens exceed the context length {self.context_length}")
        x = self.token_embedding(tokens) + self.position_embedding.weight[:length]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a norm and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float, drop_path: float = 0.0) -> None:
        super().__init__()
        self.heads, self.attention_dropout, self.drop_path = heads, dropout, drop_path
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width, bias=False)
        self.feed_out = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._branch(self.attention_out(self._attend(self.attention_norm(x))))
        hidden = F.gelu(self.feed_in(self.feed_norm(x)))
        return x + self._branch(self.feed_out(hidden))

    def _branch(self, x: Tensor) -> Tensor:
        x = self.dropout(x)
        return drop_path(x, self.drop_path) if self.drop_path and self.training else x

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.attention_in(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.attention_dropout if self.training else 0.0
        x = causal_attention(query, key, value, dropout)
        return x.transpose(1, 2).reshape(batch, length, width)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0) -> Tensor:
    """Attention of each position to itself and those before it.

    This is torch's fused kernel, except for short bfloat16 sequences on a CPU: there its backward pass is
    slow, and two batched matrix products around a softmax take a quarter of its time at 128 tokens,
    half at 256.

    Args:
        query, key, value: (batch, heads, length, head_width).
        dropout: probability of zeroing an attention weight, in [0, 1).
    """
    batch, heads, length, width = query.shape
    if query.device.type != "cpu" or query.dtype != torch.bfloat16 or length > MAX_PLAIN_LENGTH:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
    query, key, value = (x.reshape(batch * heads, length, width) for x in (query, key, value))
    past_only = query.new_full((length, length), float("-inf")).triu(1)
    weights = torch.baddbmm(past_only, query, key.transpose(1, 2), alpha=width**-0.5).softmax(-1)
    weights = F.dropout(weights, dropout, training=dropout > 0)
    return torch.bmm(weights, value).view(batch, heads, length, width)
