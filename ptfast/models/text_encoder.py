"""A small text classifier: word vectors, optional transformer blocks, pooling."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ptfast.core.errors import ConfigError
from ptfast.core.sections.section import Count, Fraction
from ptfast.models.layers import Block


class TextEncoder(nn.Module):
    """A classifier of the mean and maximum of word vectors, after `depth` transformer blocks.

    Without blocks (the default) it ignores word order and trains in seconds, which is hard to beat with a few
    thousand sentences. Training drops whole words.

    Args:
        vocab_size: number of token ids, filled from the data.
        num_classes: outputs, filled from the data.
        pad_id: token id of padding, which is ignored everywhere; filled from the data.
        context_length: longest sequence in tokens, filled from the data; needed by blocks only.
        width: size of a token's vector.
        depth: number of transformer blocks.
        heads: attention heads per block; must divide `width`.
        dropout: probability of zeroing an activation, in [0, 1).
        word_dropout: probability of dropping a word in training, in [0, 1).

    Source: Iyyer et al. 2015, "Deep Unordered Composition Rivals Syntactic Methods for Text Classification".
    """

    def __init__(
        self,
        vocab_size: Count,
        num_classes: Count,
        pad_id: int = 0,
        context_length: Count = 512,
        width: Count = 128,
        depth: int = 0,
        heads: Count = 4,
        dropout: Fraction = 0.5,
        word_dropout: float = 0.3,
    ) -> None:
        super().__init__()
        if depth and width % heads:
            raise ConfigError("C005", f"does not divide model.width={width}", key="model.heads", value=heads)
        self.pad_id, self.word_dropout = pad_id, word_dropout
        # Without blocks nothing depends on positions, and any length works.
        self.context_length = context_length if depth else None
        self.embedding = nn.Embedding(vocab_size, width, padding_idx=pad_id)
        nn.init.normal_(self.embedding.weight, std=0.1)
        with torch.no_grad():
            self.embedding.weight[pad_id].zero_()
        self.positions = nn.Parameter(torch.randn(context_length, width) * 0.02) if depth else None
        self.blocks = nn.ModuleList(Block(width, heads, dropout / 2, causal=False) for _ in range(depth))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids (batch, length) to logits (batch, num_classes)."""
        present = tokens != self.pad_id
        if self.training and self.word_dropout:
            dropped = torch.rand(tokens.shape, device=tokens.device) < self.word_dropout
            kept = present & ~dropped
            # A sentence that lost every word keeps them all.
            present = torch.where(kept.any(1, keepdim=True), kept, present)
        x = self.dropout(self.embedding(tokens))
        if self.positions is not None:
            x = x + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, present[:, None, None])
        # Mean and maximum over the tokens that are neither padding nor dropped.
        present = present[:, :, None]
        mean = (x * present).sum(1) / present.sum(1).clamp(min=1)
        maximum = x.masked_fill(~present, torch.finfo(x.dtype).min).max(1).values
        pooled = torch.cat([mean, maximum.where(present.any(1), 0.0)], dim=1)
        return self.head(self.dropout(pooled))
