"""Sequences of unequal length in one flat array, padded in batches or packed into windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ptfast.core.protocols import IGNORE_INDEX, DataInfo, PackedTokens
from ptfast.data.data_fingerprint import describe_part
from ptfast.data.decoding.text_tokenizer import Encoded, Tokenizer, encode
from ptfast.data.map_source import MapSource, as_tensor
from ptfast.data.sampling import counter_draws
from ptfast.data.sampling.sampler import Indices, permutation

if TYPE_CHECKING:
    from typing_extensions import Self

Numbers = NDArray[np.integer]


class RaggedSource(MapSource):
    """Sequences in a flat array of tokens: each has `lengths` tokens (>= 1), beginning at `starts`.

    A batch is padded with `pad_id` to its longest sequence, or to `max_length` by `Padding.fixed`.
    """

    columns: tuple[str, ...] = ("starts", "lengths")
    joins = True
    storage = "memory"
    lengths: NDArray[np.int64]

    def __init__(
        self, tokens: Numbers, starts: Numbers, lengths: Numbers, pad_id: int, max_length: int
    ) -> None:
        self.tokens, self.starts, self.pad_id, self.max_length = tokens, starts, pad_id, max_length
        self.lengths = lengths.astype(np.int64, copy=False)  # pyright: ignore[reportIncompatibleVariableOverride]

    def joined(self, others: list[Any]) -> Self:
        joined, sources = super().joined(others), (self, *others)
        joined.tokens = np.concatenate([each.tokens for each in sources])
        firsts = np.cumsum([0, *(len(each.tokens) for each in sources[:-1])])
        joined.starts = np.concatenate([e.starts + n for e, n in zip(sources, firsts, strict=True)])
        return joined

    def contents(self) -> list[Any]:
        targets: Tensor | None = getattr(self, "targets", None)
        labels = () if targets is None else (targets.numpy(),)
        return describe_part(len(self), "texts", self.tokens, self.starts, self.lengths, *labels)

    def gather(self, indices: Indices, ahead: int = 0, fill: int | None = None) -> Tensor:
        """Return sequences, shifted by `ahead` tokens and padded with `fill`: (batch, length) int64."""
        lengths = self.lengths[indices]
        columns = np.arange(self.padding.width(int(lengths.max()), self.max_length))
        places = (self.starts[indices] + ahead)[:, None] + columns
        # Indices past the end of the array are clipped here; all past a sequence are filled below.
        tokens = self.tokens.take(places, mode="clip").astype(np.int64, copy=False)
        tokens[columns >= lengths[:, None]] = self.pad_id if fill is None else fill
        return torch.from_numpy(tokens)


class TextSource(RaggedSource):
    """Texts with one label each, truncated to `max_length` tokens."""

    columns = (*RaggedSource.columns, "targets")

    def __init__(self, texts: Encoded, targets: Tensor, pad_id: int, max_length: int) -> None:
        # An empty text gets one pad token, so that there is something to average over.
        empty = texts.lengths == 0
        tokens = np.append(texts.tokens, texts.tokens.dtype.type(pad_id)) if empty.any() else texts.tokens
        starts = np.where(empty, len(texts.tokens), texts.starts)
        lengths = np.clip(texts.lengths, 1, max_length)
        super().__init__(tokens, starts, lengths, pad_id, max_length)
        self.targets = targets
        self.num_long = int((texts.lengths > max_length).sum())

    def fetch(self, indices: Indices, epoch: int = 0) -> tuple[Tensor, Tensor]:
        return self.gather(indices), self.targets.index_select(0, as_tensor(indices))


def labelled_texts(
    texts: Mapping[str, list[str]],
    labels: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    max_length: int,
    **facts: Any,
) -> tuple[DataInfo, dict[str, TextSource]]:
    """Return the facts about labeled texts, including `facts` about the labels, and a source per split."""
    sources = {
        split: TextSource(encode(own, tokenizer), labels[split], tokenizer.pad_id, max_length)
        for split, own in texts.items()
    }
    extra = {"tokenizer": tokenizer.describe(), "max_length": max_length, "pad_id": tokenizer.pad_id}
    info = DataInfo(
        kind="text",
        vocab_size=len(tokenizer),
        pad_id=tokenizer.pad_id,
        context_length=max_length,
        extra=extra,
        **facts,
    )
    return info, sources


class Documents(RaggedSource):
    """Documents for language modelling: `(inputs, targets)`, targets shifted by one and padded with -100.

    Documents longer than `max_length` become several samples; all tokens but the first are predicted once.
    """

    ignores_labels = True

    def __init__(self, texts: Encoded, pad_id: int, max_length: int) -> None:
        predicted = np.maximum(texts.lengths - 1, 0)
        parts = -(-predicted // max_length)
        documents = np.repeat(np.arange(len(parts)), parts)
        offsets = (np.arange(len(documents)) - (np.cumsum(parts) - parts)[documents]) * max_length
        lengths = np.minimum(predicted[documents] - offsets, max_length)
        super().__init__(texts.tokens, texts.starts[documents] + offsets, lengths, pad_id, max_length)
        self.num_long = int((parts > 1).sum())

    def fetch(self, indices: Indices, epoch: int = 0) -> tuple[Tensor, Tensor]:
        return self.gather(indices), self.gather(indices, 1, IGNORE_INDEX)


Lengths = NDArray[np.int64]


class PackedSequences(MapSource):
    """Windows of one length, each with several documents: `(PackedTokens, targets)`.

    Packed batches have almost no padding and a single shape. A document attends only to itself and its
    positions start at 0, so its loss is the same as without packing. Each window of `context_length` tokens
    keeps its mix of lengths; every epoch draws documents of these lengths anew.

    Cost: attention computes whole windows, with other documents masked, unless a kernel supports variable
    lengths (`models.layers.packed_mask`). Each epoch sorts the documents once.
    Source: Krell et al. 2021, arXiv:2107.02027.
    """

    columns = ("_counts", "_firsts")
    ignores_labels = True

    def __init__(self, documents: Documents, context_length: int, seed: int) -> None:
        self._documents, self._context = documents, context_length
        self.storage = documents.storage
        self._seed = counter_draws.key(seed, counter_draws.WINDOW)
        lengths = documents.lengths
        slots, self._counts = pack_lengths(lengths, context_length)
        self._firsts = np.cumsum(self._counts) - self._counts
        self._slot_order = np.argsort(slots, kind="stable")
        self._lengths, self.num_documents = lengths, len(lengths)
        self._placed: dict[int, Indices] = {}
        self.padding_share = 1 - int(lengths.sum()) / (len(self._counts) * context_length)

    def fetch(self, indices: Indices, epoch: int = 0) -> tuple[PackedTokens, Tensor]:
        counts = self._counts[indices]
        rows = np.repeat(np.arange(len(indices)), counts)
        which = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
        documents = self._in_slots(epoch)[self._firsts[indices][rows] + which]
        lengths = self._lengths[documents]
        # For every token: its document, its position there, and its place in the batch.
        token_of = np.repeat(np.arange(len(documents)), lengths)
        before = np.cumsum(lengths) - lengths
        positions = np.arange(len(token_of)) - before[token_of]
        row_starts = before[which == 0]
        places = rows * self._context + before - row_starts[rows]
        flat = places[token_of] + positions
        source = self._documents.starts[documents][token_of] + positions
        shape = (len(indices), self._context)
        inputs = np.full(shape, self._documents.pad_id, np.int64)
        targets = np.full(shape, IGNORE_INDEX, np.int64)
        # The rest of a window counts as a document, because every token must attend to something.
        used = np.bincount(rows, lengths, len(indices)).astype(np.int64)
        where = np.maximum(np.arange(self._context) - used[:, None], 0)
        inputs.reshape(-1)[flat] = self._documents.tokens[source]
        targets.reshape(-1)[flat] = self._documents.tokens[source + 1]
        where.reshape(-1)[flat] = positions
        num_sequences = len(documents) + int((used < self._context).sum())
        # Rounded up to a power of two, so that compiled models see few distinct values.
        most = 1 << (num_sequences - 1).bit_length()
        packed = PackedTokens(torch.from_numpy(inputs), torch.from_numpy(where), most)
        return packed, torch.from_numpy(targets)

    def _in_slots(self, epoch: int) -> Indices:
        """Return the document in each slot."""
        if epoch not in self._placed:
            shuffled = permutation(self._seed, epoch, len(self._lengths))
            by_length = shuffled[np.argsort(self._lengths[shuffled], kind="stable")]
            placed = np.empty_like(by_length)
            placed[self._slot_order] = by_length
            # Keep the previous epoch: workers may still read it.
            self._placed = {**dict([*self._placed.items()][-1:]), epoch: placed}
        return self._placed[epoch]


def pack_lengths(lengths: Lengths, capacity: int) -> tuple[Lengths, Lengths]:
    """Pack documents into windows; return their lengths by window, and the documents per window.

    This is best fit: the longest document goes first, into the smallest room that it fits.

    Cost: a loop over the distinct lengths and fillings, not over documents.
    """
    remaining = np.bincount(lengths, minlength=capacity + 1)
    # Fillings by the room left: (lengths, number of windows filled this way).
    fillings: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for length in np.flatnonzero(remaining)[::-1].tolist():
        left = int(remaining[length])
        while left:
            room = min((room for room, found in fillings.items() if room >= length and found), default=0)
            content, windows = fillings[room].pop() if room else ((), left)
            room = room or capacity
            times = min(room // length, left)
            filled = min(windows, left // times)
            if filled < windows and content:
                fillings[room].append((content, windows - filled))
            rest = room - times * length
            fillings.setdefault(rest, []).append((content + (length,) * times, filled))
            left -= filled * times
    slots: list[Lengths] = []
    counts: list[Lengths] = []
    for found in fillings.values():
        for content, windows in found:
            slots.append(np.tile(np.array(content, np.int64), windows))
            counts.append(np.full(windows, len(content)))
    return np.concatenate(slots), np.concatenate(counts)
