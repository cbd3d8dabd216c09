"""Sequences of unequal length in one flat array, and how those of a batch come to one length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ptfast.core.protocols import IGNORE_INDEX, DataInfo
from ptfast.data.data_fingerprint import describe_part
from ptfast.data.decoding.encoded_text import Encoded, encode
from ptfast.data.decoding.text_tokenizer import Tokenizer
from ptfast.data.map_source import MapSource, Padding, as_tensor
from ptfast.data.sampling.order import Indices

Numbers = NDArray[np.integer]
AS_THEY_COME = Padding()


class RaggedSource(MapSource):
    """Sequences cut out of a flat array of tokens.

    Args:
        tokens: of all sequences.
        starts: where each begins.
        lengths: tokens of each, >= 1.
        pad_id: what is put behind a sequence that is shorter than its batch.
        max_length: the longest that the data allows, to which `Padding.fixed` pads.
    """

    in_memory = True

    def __init__(
        self, tokens: Numbers, starts: Numbers, lengths: Numbers, pad_id: int, max_length: int
    ) -> None:
        self.tokens, self.starts, self.pad_id, self.max_length = tokens, starts, pad_id, max_length
        self._lengths = lengths.astype(np.int64, copy=False)
        self._padding = AS_THEY_COME

    def __len__(self) -> int:
        return len(self._lengths)

    def lengths(self) -> NDArray[np.int64]:
        return self._lengths

    def pad(self, padding: Padding) -> None:
        self._padding = padding

    def contents(self) -> list[Any]:
        targets: Tensor | None = getattr(self, "targets", None)
        labels = () if targets is None else (targets.numpy(),)
        return describe_part(len(self), "texts", self.tokens, self.starts, self._lengths, *labels)

    def gather(self, indices: Indices, ahead: int = 0, fill: int | None = None) -> Tensor:
        """Sequences, or what stands `ahead` tokens further on: (batch, length) int64, filled up."""
        lengths = self._lengths[indices]
        columns = np.arange(self._padding.width(int(lengths.max()), self.max_length))
        places = (self.starts[indices] + ahead)[:, None] + columns
        # Places beyond a sequence may lie beyond the array; they are clipped here and filled below.
        tokens = self.tokens.take(places, mode="clip").astype(np.int64, copy=False)
        tokens[columns >= lengths[:, None]] = self.pad_id if fill is None else fill
        return torch.from_numpy(tokens)


class TextSource(RaggedSource):
    """Texts with a label each, of which at most the first `max_length` tokens are kept."""

    def __init__(self, texts: Encoded, targets: Tensor, pad_id: int, max_length: int) -> None:
        # A text without tokens would have nothing to average over: one pad is the least.
        empty = texts.lengths == 0
        tokens = np.append(texts.tokens, texts.tokens.dtype.type(pad_id)) if empty.any() else texts.tokens
        starts = np.where(empty, len(texts.tokens), texts.starts)
        lengths = np.clip(texts.lengths, 1, max_length)
        super().__init__(tokens, starts, lengths, pad_id, max_length)
        self.targets = targets
        self.num_cut = int((texts.lengths > max_length).sum())

    def fetch(self, indices: Indices, epoch: int = 0) -> tuple[Tensor, Tensor]:
        return self.gather(indices), self.targets.index_select(0, as_tensor(indices))


def labelled_texts(
    texts: Mapping[str, list[str]],
    labels: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    max_length: int,
    *,
    num_classes: int,
    class_names: tuple[str, ...] | None,
) -> tuple[DataInfo, dict[str, TextSource]]:
    """The facts about texts of one class each, and the texts of each split."""
    sources = {
        split: TextSource(encode(own, tokenizer), labels[split], tokenizer.pad_id, max_length)
        for split, own in texts.items()
    }
    extra = {"tokenizer": tokenizer.describe(), "max_length": max_length, "pad_id": tokenizer.pad_id}
    info = DataInfo(
        kind="text",
        task="classification",
        num_classes=num_classes,
        class_names=class_names,
        vocab_size=len(tokenizer),
        pad_id=tokenizer.pad_id,
        context_length=max_length,
        extra=extra,
    )
    return info, sources


class Documents(RaggedSource):
    """Documents to model: `(inputs, targets)`, the targets one token further on and -100 behind the end.

    A document longer than `max_length` comes as several samples, one after another, of which each begins at
    position 0: every token but a document's first is predicted once.
    """

    def __init__(self, texts: Encoded, pad_id: int, max_length: int) -> None:
        predicted = np.maximum(texts.lengths - 1, 0)
        parts = -(-predicted // max_length)
        documents = np.repeat(np.arange(len(parts)), parts)
        offsets = (np.arange(len(documents)) - (np.cumsum(parts) - parts)[documents]) * max_length
        lengths = np.minimum(predicted[documents] - offsets, max_length)
        super().__init__(texts.tokens, texts.starts[documents] + offsets, lengths, pad_id, max_length)
        self.num_cut = int((parts > 1).sum())

    def ignores_labels(self) -> bool:
        return True

    def fetch(self, indices: Indices, epoch: int = 0) -> tuple[Tensor, Tensor]:
        return self.gather(indices), self.gather(indices, 1, IGNORE_INDEX)
