"""A decoder-only transformer for language modeling."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ptfast.core.errors import ConfigError
from ptfast.core.protocols import PackedTokens
from ptfast.core.sections.section import Count, Fraction
from ptfast.models.layers import Block, packed_mask, rate_of_block


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
            `models.layers.drop_path`.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """

    takes_packed = True
    """Whether batches may contain packed documents."""

    def __init__(
        self,
        vocab_size: Count,
        context_length: Count,
        width: Count = 128,
        depth: Count = 4,
        heads: Count = 4,
        dropout: Fraction = 0.0,
        tied_head: bool = False,
        drop_path: Fraction = 0.0,
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
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                # Each block adds two branches to the residual stream: keep its variance independent of depth.
                std = 0.02 / (2 * depth) ** 0.5 if name.endswith("out") else 0.02
                nn.init.normal_(module.weight, std=std)

    def forward(self, inputs: Tensor | PackedTokens) -> Tensor:
        """Map token ids (batch, length) to logits of the next token (batch, length, vocab_size)."""
        tokens, positions, num = inputs if isinstance(inputs, PackedTokens) else (inputs, None, 0)
        length = tokens.shape[1]
        if length > self.context_length:
            raise ValueError(f"{length} tokens exceed the context length {self.context_length}")
        mask = None
        if positions is None:
            places = self.position_embedding.weight[:length]
        else:
            places = self.position_embedding(positions)
            block: Any = self.blocks[0]
            mask = packed_mask(positions, num, block)
        x = self.dropout(self.token_embedding(tokens) + places)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))
