"""Samples that are fetched by index, and what all sources of samples have in common."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ptfast.core.errors import DataError
from ptfast.data.data_fingerprint import describe_part
from ptfast.data.decoding.image_decoding import Pixels, in_threads
from ptfast.data.label_checks import LabelCheck
from ptfast.data.loaders.shared_memory import SharedArrays
from ptfast.data.sampling.sampler import Indices
from ptfast.data.transforms.resized_crops import Boxes, Sizes, resized_crop

if TYPE_CHECKING:
    from typing_extensions import Self

_CHUNK = 1024
"""Samples that are fetched at a time when all are read."""


class Padding(NamedTuple):
    """How the sequences of a batch are padded to one length: as the config's `batching` says."""

    fixed: bool = False
    """Always pad to the longest that the data allows."""
    multiple: int = 1

    def width(self, longest: int, limit: int) -> int:
        """Tokens of a batch whose longest sequence has `longest`, at most `limit`."""
        return limit if self.fixed else min(-(-longest // self.multiple) * self.multiple, limit)


class BaseSource:
    """Samples, fetched by index or read in a stream."""

    images = False
    """Raw inputs are uint8 images, channels last: (batch, height, width, channels)."""
    storage: Literal["files", "pack", "memory"] = "files"
    """Where fetching gets samples: from files or the user's code, a memory-mapped pack, or memory."""
    repeatable = False
    """A sample is the same each time and draws from no generator: it may be kept in memory, or fetched by a
    thread during the training."""
    ignores_labels = False
    """Some labels may be ignored ones, whatever `targets` show."""
    lengths: NDArray[np.int64] | None = None
    """Tokens of each sample; None unless samples are sequences of unequal length."""
    label_check = LabelCheck()
    padding = Padding()

    @property
    def decoded_bytes(self) -> int | None:
        """Size of all inputs once decoded and kept in memory; None if unknown."""
        return None

    @property
    def original_bytes(self) -> int | None:
        """Size of all images kept in memory at their original size; None if unknown."""
        return self.decoded_bytes

    def contents(self) -> list[Any] | None:
        """Fingerprint of these samples, by `data_fingerprint`; None where there is none."""
        return None

    def order(self, seed: int, epoch: int) -> Indices | None:
        """The order of the samples in an epoch; None where any order will do."""
        return None

    def in_order(self) -> Self:
        """The same samples as they are evaluated: each at one place, whatever the epoch."""
        return self


class MapSource(BaseSource):
    """Samples by index. Subclasses give `fetch` and `columns`."""

    columns: tuple[str, ...]
    """Names of the attributes with an entry for each sample: arrays, tensors and lists; all but the first may
    be None."""
    joins = False
    """Sources with these columns become one by `joined`."""
    crops_originals = True
    """Random crops are taken from each original image; else from images that were fetched."""

    @property
    def parts(self) -> Sequence[MapSource]:
        """The sources that fetch the samples: this one, unless it joins several."""
        return [self]

    def __len__(self) -> int:
        return len(getattr(self, self.columns[0]))

    def to_memory(self, arrays: SharedArrays | None = None) -> TensorSource:
        """Every sample, decoded once and kept in memory; `arrays` may share images between ranks.

        Raises:
            DataError: D008 if they differ in shape.
        """
        size = len(self)
        parts = [np.arange(i, min(i + _CHUNK, size)) for i in range(0, size, _CHUNK)]
        try:
            if not self.images:
                inputs, targets = (torch.cat(column) for column in zip(*map(self.fetch, parts), strict=True))
                return TensorSource(inputs, targets)
            # Targets lie before pixels, so that both are aligned.
            first = self.fetch(parts[0][:1])[::-1]
            ends = np.cumsum([column.nbytes * size for column in first])

            def columns(memory: NDArray[np.uint8]) -> list[Tensor]:
                pieces = np.split(memory, ends[:1])
                return [
                    torch.from_numpy(piece).view(column.dtype).view(size, *column.shape[1:])
                    for piece, column in zip(pieces, first, strict=True)
                ]

            def fill(memory: NDArray[np.uint8]) -> None:
                for part in parts:
                    for column, values in zip(columns(memory), self.fetch(part)[::-1], strict=True):
                        column[part[0] : part[-1] + 1].copy_(values.view(len(part), *column.shape[1:]))

            targets, inputs = columns((arrays or SharedArrays()).fill((int(ends[-1]),), fill)[0])
        except (RuntimeError, TypeError, ValueError):
            what = "samples that are not (input, target) tensors of one shape cannot be kept in memory"
            raise DataError("D008", what, key="dataloader", suggestion="Use dataloader=auto") from None
        return TensorSource(inputs, targets, images=True)

    def take(self, indices: Indices) -> Self:
        """Samples `indices` as a source of their own, of the same kind."""
        taken = copy(self)
        for name in self.columns:
            column = getattr(self, name)
            if isinstance(column, Tensor):
                column = column.index_select(0, as_tensor(indices))
            elif isinstance(column, list):
                column = [column[i] for i in indices]
            elif column is not None:
                column = column[indices]
            setattr(taken, name, column)
        return taken

    def joined(self, others: list[Self]) -> Self:
        """These samples and those of other sources of this class, one after the other."""
        joined, sources = copy(self), (self, *others)
        for name in self.columns:
            parts = [getattr(source, name) for source in sources]
            join: Any = torch.cat if isinstance(parts[0], Tensor) else np.concatenate
            setattr(joined, name, [*chain(*parts)] if isinstance(parts[0], list) else join(parts))
        return joined

    def spread(self, most: int) -> Indices:
        """Up to `most` samples, evenly spread over all, because data is often sorted."""
        size = len(self)
        return np.unique(np.linspace(0, size - 1, min(size, most)).astype(np.int64))

    def fetch(self, indices: Indices, epoch: int = 0) -> Any:
        """The raw batch `(inputs, targets)` of samples `indices`, on the CPU, as they are stored."""
        raise NotImplementedError

    def labels(self, indices: Indices) -> Tensor:
        targets: Tensor = self.targets  # pyright: ignore[reportAttributeAccessIssue] # those that have them
        return targets.index_select(0, as_tensor(indices))

    def known_labels(self) -> Tensor | None:
        """The target of every sample; None if they would have to be read first."""
        targets = getattr(self, "targets", None)
        return targets if isinstance(targets, Tensor) else None

    def original(self, index: int) -> Pixels:
        """Image `index` as it is stored, (height, width, channels) of its own."""
        raise NotImplementedError

    def sizes(self, indices: Indices) -> tuple[Sizes, Sizes]:
        """Original heights and widths of images `indices`, before they were stored here."""
        raise NotImplementedError

    def crops(self, indices: Indices, boxes: Boxes, size: int, mirrored: Indices) -> Tensor:
        """A box of each of the images `indices`, scaled to one size: uint8 (batch, size, size, channels)."""
        pieces = in_threads(
            len(indices),
            lambda i: resized_crop(self.original(indices[i]), boxes[i], bool(mirrored[i]), size),
        )
        return torch.stack(pieces)

    def pixel_sums(self, indices: Indices) -> tuple[int, Tensor, Tensor] | None:
        """Count, sums and sums of squares of pixels, per channel; None if they were never summed up."""
        return None


@dataclass(eq=False, repr=False)
class TensorSource(MapSource):
    """Samples kept in memory; images as uint8 (samples, height, width, channels)."""

    inputs: Tensor
    targets: Tensor
    images: bool = field(default=False, kw_only=True)
    columns = ("inputs", "targets")
    joins = True
    storage = "memory"
    repeatable = True

    def fetch(self, indices: Indices, epoch: int = 0) -> tuple[Tensor, Tensor]:
        index = as_tensor(indices)
        return self.inputs.index_select(0, index), self.targets.index_select(0, index)

    def sizes(self, indices: Indices) -> tuple[Sizes, Sizes]:
        height, width = self.inputs.shape[1:3]
        return np.full(len(indices), height), np.full(len(indices), width)

    def original(self, index: int) -> Pixels:
        return self.inputs[index].numpy()

    @property
    def decoded_bytes(self) -> int:
        return self.inputs.numel() * self.inputs.element_size()

    def contents(self) -> list[Any]:
        return describe_part(len(self), "samples", self.inputs.numpy(), self.targets.numpy())

    @property
    def prepared_bytes(self) -> int:
        """Size of the inputs once normalized."""
        return self.inputs.numel() * (4 if self.images else self.inputs.element_size())


class JoinedSource(MapSource):
    """Samples of several sources, one after the other, each fetched by its own; all are of one shape."""

    columns = ("_parts", "_numbers")
    crops_originals = False

    def __init__(self, sources: list[MapSource]) -> None:
        self._sources, sizes = sources, [*map(len, sources)]
        self._parts = np.repeat(np.arange(len(sources)), sizes)
        self._numbers = np.concatenate([np.arange(size) for size in sizes])
        self._firsts = np.cumsum([0, *sizes])
        self.images, kinds = sources[0].images, {each.storage for each in sources}
        self.storage = "files" if "files" in kinds else "pack" if "pack" in kinds else "memory"
        self.repeatable = all(each.repeatable for each in sources)
        self.ignores_labels = any(each.ignores_labels for each in sources)

    @property
    def parts(self) -> Sequence[MapSource]:
        return self._sources

    def fetch(self, indices: Indices, epoch: int = 0) -> tuple[Tensor, ...]:
        parts, numbers = self._parts[indices], self._numbers[indices]
        places = [np.flatnonzero(parts == part) for part in range(len(self._sources))]
        pairs = zip(self._sources, places, strict=True)
        fetched = [each.fetch(numbers[own], epoch) for each, own in pairs if len(own)]
        order = torch.from_numpy(np.argsort(np.concatenate(places)))
        try:
            return tuple(torch.cat(column)[order] for column in zip(*fetched, strict=True))
        except (RuntimeError, TypeError, ValueError):
            what, hint = "samples of the parts differ in shape or are no tensors", "Bring them to one shape"
            raise DataError("D008", what, key="data.parts", suggestion=hint) from None

    def known_labels(self) -> Tensor | None:
        labels = [each.known_labels() for each in self._sources]
        known = [each for each in labels if each is not None]
        places = as_tensor(self._firsts[self._parts] + self._numbers)
        return torch.cat(known)[places] if len(known) == len(labels) else None

    def in_order(self) -> Self:
        joined = copy(self)
        joined._sources = [each.in_order() for each in self._sources]
        return joined


def as_tensor(array: np.ndarray) -> Tensor:
    """`array` as a tensor on the same memory; copied if it is read-only, which torch cannot express."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
