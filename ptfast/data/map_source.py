"""Sources of samples that are fetched by index, and the base class of all sources."""

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
"""Number of samples to fetch at a time when all are read."""


class Padding(NamedTuple):
    """How the sequences of a batch are padded to one length, by the config's `batching`."""

    fixed: bool = False
    """Always pad to the maximum length of the data."""
    multiple: int = 1

    def width(self, longest: int, limit: int) -> int:
        """Return the padded length of a batch, at most `limit`; its longest sequence has `longest` tokens."""
        return limit if self.fixed else min(-(-longest // self.multiple) * self.multiple, limit)


class BaseSource:
    """Samples, fetched by index or read in a stream."""

    images = False
    """Whether raw inputs are uint8 images, channels last: (batch, height, width, channels)."""
    storage: Literal["files", "pack", "memory"] = "files"
    """Where samples are read: from files or the user's code, a memory-mapped pack, or memory."""
    repeatable = False
    """Whether a sample is the same each time and uses no random generator, so that it may be kept in memory
    or fetched in a thread during training."""
    ignores_labels = False
    """Whether some labels may be ignored, even if `targets` contains no such label."""
    lengths: NDArray[np.int64] | None = None
    """Number of tokens of each sample; None unless samples are sequences of different lengths."""
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
        """Return the fingerprint of these samples, by `data_fingerprint`; None if they have none."""
        return None

    def order(self, seed: int, epoch: int) -> Indices | None:
        """Return the order of the samples in an epoch; None if any order is fine."""
        return None

    def in_order(self) -> Self:
        """Return the same samples for evaluation, in an order that does not depend on the epoch."""
        return self


class MapSource(BaseSource):
    """Samples that are fetched by index. Subclasses define `fetch` and `columns`."""

    columns: tuple[str, ...]
    """Names of the attributes with one entry per sample: arrays, tensors or lists; all but the first may be
    None."""
    joins = False
    """Whether `joined` can concatenate sources that have the same columns."""
    crops_originals = True
    """Whether random crops are taken from the original images; otherwise from fetched images."""

    @property
    def parts(self) -> Sequence[MapSource]:
        """The sources that fetch the samples: this one, unless it joins several."""
        return [self]

    def __len__(self) -> int:
        return len(getattr(self, self.columns[0]))

    def to_memory(self, arrays: SharedArrays | None = None) -> TensorSource:
        """Decode every sample into memory; `arrays` may share images between ranks.

        Raises:
            DataError: D008 if samples differ in shape.
        """
        size = len(self)
        parts = [np.arange(i, min(i + _CHUNK, size)) for i in range(0, size, _CHUNK)]
        try:
            if not self.images:
                inputs, targets = (torch.cat(column) for column in zip(*map(self.fetch, parts), strict=True))
                return TensorSource(inputs, targets)
            # Targets are stored before pixels, so that both are aligned.
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
        """Return a source of the same class with only the samples `indices`."""
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
        """Return these samples followed by those of other sources of this class."""
        joined, sources = copy(self), (self, *others)
        for name in self.columns:
            parts = [getattr(source, name) for source in sources]
            join: Any = torch.cat if isinstance(parts[0], Tensor) else np.concatenate
            setattr(joined, name, [*chain(*parts)] if isinstance(parts[0], list) else join(parts))
        return joined

    def spread(self, most: int) -> Indices:
        """Return up to `most` evenly spread indices, because data is often sorted."""
        size = len(self)
        return np.unique(np.linspace(0, size - 1, min(size, most)).astype(np.int64))

    def fetch(self, indices: Indices, epoch: int = 0) -> Any:
        """Return the raw batch `(inputs, targets)` of samples `indices`, on the CPU, as they are stored."""
        raise NotImplementedError

    def labels(self, indices: Indices) -> Tensor:
        targets: Tensor = self.targets  # pyright: ignore[reportAttributeAccessIssue] # those that have them
        return targets.index_select(0, as_tensor(indices))

    def known_labels(self) -> Tensor | None:
        """Return the target of every sample; None if targets would have to be read first."""
        targets = getattr(self, "targets", None)
        return targets if isinstance(targets, Tensor) else None

    def original(self, index: int) -> Pixels:
        """Return image `index` as it is stored: (height, width, channels), of any size."""
        raise NotImplementedError

    def sizes(self, indices: Indices) -> tuple[Sizes, Sizes]:
        """Return the original heights and widths of images `indices`, before they were stored here."""
        raise NotImplementedError

    def crops(self, indices: Indices, boxes: Boxes, size: int, mirrored: Indices) -> Tensor:
        """Crop a box from each of the images `indices` and resize it: uint8 (batch, size, size, channels)."""
        pieces = in_threads(
            len(indices),
            lambda i: resized_crop(self.original(indices[i]), boxes[i], bool(mirrored[i]), size),
        )
        return torch.stack(pieces)

    def pixel_sums(self, indices: Indices) -> tuple[int, Tensor, Tensor] | None:
        """Return count, sums and sums of squares of pixels, per channel; None if not precomputed."""
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
    """The concatenated samples of several sources; each source fetches its own. All have one shape."""

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
    """Return `array` as a tensor on the same memory; copied if read-only, which torch does not support."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
