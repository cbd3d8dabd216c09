"""Images of different sizes, from files or memory, resized to one size when fetched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ptfast.core.errors import DataError
from ptfast.core.machine import spare_cores
from ptfast.core.protocols import IGNORE_INDEX
from ptfast.data.decoding.image_decoding import Pixels, decode_file, fit, in_threads, mixed_sizes, size_of
from ptfast.data.loaders.shared_memory import SharedArrays
from ptfast.data.loaders.worker_processes import WorkerPool
from ptfast.data.map_source import MapSource, TensorSource
from ptfast.data.sampling.sampler import Indices
from ptfast.data.transforms.resized_crops import Sizes

OnCorrupt = Literal["error", "skip"]
REMEDY = "Replace the file, remove it, or leave such files out with data.on_corrupt=skip"
_SOME = 64
"""Number of files used to estimate the average size."""
_CHUNK, _FEW_CHUNKS, _MOST_DECODERS = 256, 16, 16
_SMALL = 3 * 100 * 100
"""Images of fewer bytes are decoded faster than a thread acquires the GIL."""


class ImageSource(MapSource):
    """Images with one class each, resized to `image_size` when fetched. Subclasses define `original`.

    They are read by as many threads as torch uses: decoding releases the GIL.
    """

    columns = ("targets",)
    images = True
    repeatable = True
    targets: Tensor
    """int64 (images,)."""
    image_size: int | None = None
    """Side of the square that fetched images are resized to; None to keep their size."""
    shape: tuple[int, ...] = ()
    """(height, width, channels) of every fetched image; empty until known."""

    @property
    def decoded_bytes(self) -> int | None:
        return len(self) * math.prod(self.shape) if self.shape else None

    def name_of(self, index: int) -> str:
        """Return the name of image `index`, for messages."""
        return "data"

    def fitted(self, index: int) -> Pixels:
        """Return image `index` at the size that `fetch` returns."""
        image = self.original(index)
        return image if self.image_size is None else fit(image, self.image_size)

    def fetch(self, indices: Indices, epoch: int = 0) -> tuple[Tensor, Tensor]:
        images = in_threads(len(indices), lambda place: self.fitted(indices[place]))
        expected = self.shape or images[0].shape
        for index, image in zip(indices, images, strict=True):
            if image.shape != expected:
                raise mixed_sizes(self.name_of(index), image.shape, expected)
        return torch.from_numpy(np.stack(images)), self.labels(indices)


class ImageFiles(ImageSource):
    """Image files that are decoded on every fetch.

    Args:
        on_corrupt: `error` rejects a file that cannot be decoded. `skip` returns the next readable one in its
            place, with an ignored label, so that all other samples keep their index.
    """

    columns = ("targets", "paths", "_corrupt", "_converted", "_sizes")
    joins = True

    def __init__(
        self,
        paths: Sequence[str],
        targets: Tensor,
        image_size: int | None = None,
        on_corrupt: OnCorrupt = "error",
    ) -> None:
        self.paths, self.targets, self.image_size = paths, targets, image_size
        self.skips = on_corrupt == "skip"
        # Known for the files read so far: unreadable, not 8-bit RGB; height and width.
        self._corrupt, self._converted = np.zeros((2, len(paths)), np.bool_)
        self._sizes = np.zeros((len(paths), 2), np.int32)

    @property
    def original_bytes(self) -> int:
        return int(3 * len(self) * np.prod(self.sizes(self.spread(_SOME)), 0).mean())

    @property
    def num_converted(self) -> int:
        """Number of images fetched so far that were not 8-bit RGB."""
        # A substitute for an unreadable file is counted only at its own index.
        return int((self._converted & ~self._corrupt).sum())

    def name_of(self, index: int) -> str:
        return self.paths[index]

    def original(self, index: int) -> Pixels:
        """Decode image `index`, or the next readable one if unreadable files are skipped."""
        for other in chain(range(index, len(self.paths)), range(index)) if self.skips else (index,):
            if self._corrupt[other]:
                continue
            try:
                pixels, converted = decode_file(self.paths[other])
            except DataError as error:
                if not self.skips:
                    raise error.changed(suggestion=REMEDY) from None
                self._corrupt[other] = True
            else:
                self._converted[index] |= converted
                return pixels
        raise DataError("D005", "cannot be decoded, and neither can any other file", key=self.paths[index])

    def labels(self, indices: Indices) -> Tensor:
        """Return the targets of samples already fetched; `IGNORE_INDEX` for unreadable ones."""
        labels = super().labels(indices)
        labels[torch.from_numpy(self._corrupt[indices])] = IGNORE_INDEX
        return labels

    def sizes(self, indices: Indices) -> tuple[Sizes, Sizes]:
        """Return heights and widths of the images; each file is read once."""
        for index in indices:
            if not self._sizes[index, 0]:
                try:
                    self._sizes[index] = size_of(self.paths[int(index)])
                except DataError:
                    if not self.skips:
                        raise
                    self._sizes[index] = 1
        heights, widths = self._sizes[indices].astype(np.int64).T
        return heights, widths

    def note_unreadable(self, indices: Indices, targets: Tensor) -> None:
        """Record samples of `indices` that were unreadable for the process that fetched `targets`."""
        self._corrupt[indices[targets.numpy() == IGNORE_INDEX]] = True

    def unreadable(self) -> list[str]:
        """Return the names of files known to be unreadable."""
        return [self.paths[int(i)] for i in np.flatnonzero(self._corrupt)]

    def to_memory(self, arrays: SharedArrays | None = None) -> TensorSource:
        """Decode all images into one tensor, on the spare cores of all ranks that share it.

        Small images are decoded by processes: threads would contend for the GIL, and 16 of them take three
        times as long as one.
        """
        if self.skips:
            memory = super().to_memory(arrays)
            self.note_unreadable(np.arange(len(self)), memory.targets)
            return memory
        arrays = arrays or SharedArrays()
        shape = self.shape or tuple(self.fetch(np.arange(1))[0].shape[1:])

        places = range(len(self))
        chunks = [places[start : start + _CHUNK] for start in places[::_CHUNK]]

        def fill(images: Pixels) -> NDArray[np.bool_]:
            decoders = spare_cores(_MOST_DECODERS) * arrays.num_sharing
            if math.prod(shape) < _SMALL and len(chunks) > _FEW_CHUNKS and decoders > 1:
                decoded = WorkerPool(partial(self._decode, shape), decoders, 2).fetch(chunks)
                for chunk, (pixels, converted) in zip(chunks, decoded, strict=True):
                    images[chunk.start : chunk.stop] = pixels
                    self._converted[chunk.start : chunk.stop] = converted
                return self._converted
            with ThreadPoolExecutor(decoders) as pool:
                try:
                    list(pool.map(partial(self._decode, shape, into=images), chunks))
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
            return self._converted

        images, self._converted = arrays.fill((len(self), *shape), fill)
        return TensorSource(torch.from_numpy(images), self.targets, images=True)

    def _decode(
        self, shape: tuple[int, ...], chunk: range, *, into: Pixels | None = None
    ) -> tuple[Tensor, Tensor]:
        """Decode a chunk, `into` an array if given; return the images and which were converted."""
        images = np.empty((len(chunk), *shape), np.uint8) if into is None else into[chunk.start : chunk.stop]
        for image, place in zip(images, chunk, strict=True):
            pixels = self.fitted(place)
            if pixels.shape != shape:
                raise mixed_sizes(self.paths[place], pixels.shape, shape)
            image[:] = pixels
        converted = self._converted[chunk.start : chunk.stop]
        return torch.from_numpy(images), torch.from_numpy(converted)


def set_shapes(sources: Mapping[str, ImageSource]) -> tuple[int, ...]:
    """Require all splits to have the size of the first training image; return (channels, height, width)."""
    shape = tuple(sources["train"].fetch(np.arange(1))[0].shape[1:])
    for source in sources.values():
        source.shape = shape
    return (shape[2], *shape[:2])


class ImagesInMemory(ImageSource):
    """The images of another source in memory, at their original size, which crops need.

    Cost: memory for all pixels, a few times the size of the files.
    """

    columns = ("targets", "_pixels", "_sizes")
    storage = "memory"

    def __init__(self, source: ImageSource) -> None:
        everything = np.arange(len(source))
        self.image_size = source.image_size
        self._pixels: list[Pixels] = in_threads(len(source), source.original)
        self._sizes = np.stack(source.sizes(everything), 1)
        self.targets = source.labels(everything)

    def original(self, index: int) -> Pixels:
        return self._pixels[index]

    def sizes(self, indices: Indices) -> tuple[Sizes, Sizes]:
        heights, widths = self._sizes[indices].T
        return heights, widths
