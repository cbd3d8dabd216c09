"""Images in files, decoded each time they are fetched."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ptfast.core.errors import ConfigError, DataError
from ptfast.core.protocols import IGNORE_INDEX
from ptfast.data.decoding.image_decoding import (
    Decoder,
    Pixels,
    decode_all,
    fit,
    in_threads,
    mixed_sizes,
    size_of,
)
from ptfast.data.loaders.shared_memory import Holder
from ptfast.data.map_source import Held, MapSource, TensorSource, as_tensor
from ptfast.data.sampling.sampler import Indices
from ptfast.data.transforms.resized_crops import Boxes, Sizes, crop_all, resized_crop

OnCorrupt = Literal["error", "skip"]
REMEDY = "Replace the file, remove it, or leave such files out with data.on_corrupt=skip"
_SOME = 64
"""Files whose sizes tell how large all are, about."""


class ImageFiles(MapSource):
    """Images that are decoded each time they are fetched, by as many threads as torch has here.

    Decoding leaves the interpreter to others, so that threads of one process do it side by side.

    Args:
        paths: of the files.
        targets: int64 (files,).
        decoder: brings whole images to their size.
        on_corrupt: `error` refuses a file that cannot be decoded. `skip` shows the next one that can be in
            its place, with a label that does not count, so that every other sample keeps its index.
    """

    images = True
    repeatable = True

    def __init__(
        self,
        paths: Sequence[str],
        targets: Tensor,
        decoder: Decoder,
        on_corrupt: OnCorrupt = "error",
        threads: int = 1,
    ) -> None:
        self.paths, self.targets, self.decoder, self.skips = paths, targets, decoder, on_corrupt == "skip"
        self.threads = threads
        self.corrupt: set[int] = set()
        """Samples that are known to be unreadable."""
        self._converted: set[int] = set()
        self.shape: tuple[int, ...] = ()
        """(height, width, channels) of every image; empty until it is known."""
        self.image_size = decoder.image_size
        self._whole = Decoder(remedy=decoder.remedy)
        self._sizes = np.zeros((2, len(paths)), np.int32)

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def held_bytes(self) -> int | None:
        return len(self.paths) * math.prod(self.shape) if self.shape else None

    @property
    def original_bytes(self) -> int:
        some = np.unique(np.linspace(0, len(self) - 1, _SOME).astype(np.int64))
        return int(3 * len(self) * np.prod(self.sizes(some), 0).mean())

    @property
    def num_converted(self) -> int:
        # In place of an unreadable file another is shown, which counts for itself.
        return len(self._converted - self.corrupt)

    def fetch(self, indices: Indices, epoch: int = 0) -> tuple[Tensor, Tensor]:
        pixels = self._pixels(indices, self.decoder)
        expected = self.shape or pixels[0].shape
        for index, image in zip(indices, pixels, strict=True):
            if image.shape != expected:
                raise mixed_sizes(self.paths[int(index)], image.shape, expected)
        return torch.from_numpy(np.stack(pixels)), self.labels(indices)

    def labels(self, indices: Indices) -> Tensor:
        """The targets of samples `indices`, which have been fetched; `IGNORE_INDEX` for unreadable ones."""
        labels = super().labels(indices)
        if self.corrupt:
            labels[torch.from_numpy(np.isin(indices, list(self.corrupt)))] = IGNORE_INDEX
        return labels

    def originals(self, indices: Indices) -> list[Pixels]:
        return self._pixels(indices, self._whole)

    def sizes(self, indices: Indices) -> tuple[Sizes, Sizes]:
        """Heights and widths of the images by their files, each read once."""
        for index in indices:
            if not self._sizes[0, index]:
                self._sizes[:, index] = self._size_of(index)
        heights, widths = self._sizes[:, indices].astype(np.int64)
        return heights, widths

    def crops(self, indices: Indices, boxes: Boxes, size: int, mirrored: Indices) -> Tensor:
        def crop(path: str, place: int) -> Tensor:
            return resized_crop(self._whole(path).pixels, boxes[place], bool(mirrored[place]), size)

        return torch.stack(self._each(indices, crop))

    def note_unreadable(self, indices: Indices, targets: Tensor) -> None:
        self.corrupt.update(indices[targets.numpy() == IGNORE_INDEX].tolist())

    def unreadable(self) -> list[str]:
        return [self.paths[i] for i in sorted(self.corrupt)]

    def ignores_labels(self) -> bool:
        return self.skips or super().ignores_labels()

    def _size_of(self, index: int) -> tuple[int, int]:
        try:
            return size_of(self.paths[index])
        except DataError:
            if not self.skips:
                raise
            return 1, 1

    def _pixels(self, indices: Indices, decoder: Decoder) -> list[Pixels]:
        decoded = self._each(indices, lambda path, _: decoder(path))
        self._converted.update(int(i) for i, image in zip(indices, decoded, strict=True) if image.converted)
        return [image.pixels for image in decoded]

    def _each(self, indices: Indices, read: Callable[[str, int], Any]) -> list[Any]:
        """Call `read` on the file and the place of each of `indices`."""
        return in_threads(len(indices), lambda place: self._readable(int(indices[place]), place, read))

    def _readable(self, index: int, place: int, read: Callable[[str, int], Any]) -> Any:
        """Call `read` on file `index`, or where files may be skipped, of the next that it can read."""
        if not self.skips:
            return read(self.paths[index], place)
        for other in chain(range(index, len(self.paths)), range(index)):
            if other not in self.corrupt:
                try:
                    return read(self.paths[other], place)
                except DataError:
                    self.corrupt.add(other)
        raise DataError("D005", "cannot be decoded, nor any other file", key=self.paths[index])

    def hold(self, holder: Holder | None = None) -> Held:
        if self.skips:
            return super().hold(holder)
        images, num_converted = decode_all(self.decoder, self.paths, self.threads, holder)
        return Held(TensorSource(images, self.targets, images=True), num_converted)

    def take(self, indices: Indices) -> ImageFiles:
        taken = type(self)(
            self._select(indices),
            self.targets.index_select(0, as_tensor(indices)),
            self.decoder,
            "skip" if self.skips else "error",
            self.threads,
        )
        taken.shape = self.shape
        return taken

    def _select(self, indices: Indices) -> Any:
        """The paths at `indices`, as the constructor takes them."""
        return [self.paths[int(i)] for i in indices]


def set_shapes(sources: Mapping[str, ImageFiles]) -> tuple[int, ...]:
    """Expect images of one size from all splits, that of the first: (channels, height, width)."""
    shape = tuple(sources["train"].fetch(np.arange(1))[0].shape[1:])
    for source in sources.values():
        source.shape = shape
    return (shape[2], *shape[:2])


class HeldImages(MapSource):
    """The images of another source in memory, as large as they are there.

    A crop of an image that was brought to its final size before would show other pixels. In memory it costs
    no decoding, which is most of the work for a JPEG.

    Args:
        source: images that have `originals`.

    Cost: the memory of all pixels, a few times that of the files.
    """

    images = True
    in_memory = True
    repeatable = True

    def __init__(self, source: MapSource) -> None:
        everything = np.arange(len(source))
        self.image_size = source.image_size
        self._pixels: list[Pixels] = source.originals(everything)
        self._sizes = np.stack(source.sizes(everything))
        self.targets = source.labels(everything)

    def __len__(self) -> int:
        return len(self._pixels)

    def fetch(self, indices: Indices, epoch: int = 0) -> tuple[Tensor, Tensor]:
        images = self.originals(indices)
        if self.image_size is not None:
            images = [fit(pixels, self.image_size) for pixels in images]
        for pixels in images:
            if pixels.shape != images[0].shape:
                raise mixed_sizes("data", pixels.shape, images[0].shape)
        return torch.from_numpy(np.stack(images)), self.targets.index_select(0, as_tensor(indices))

    def originals(self, indices: Indices) -> list[Pixels]:
        return [self._pixels[i] for i in indices]

    def in_one_size(self) -> TensorSource:
        """The same as one tensor."""
        shapes = {pixels.shape for pixels in self._pixels}
        if len(shapes) > 1:
            what = f"images lie on the device in one size, and these have {len(shapes):,}"
            hint = "Use dataloader=memory, or augment.resized_crop=null"
            raise ConfigError("C011", what, key="dataloader.kind", value="device", suggestion=hint)
        return TensorSource(torch.from_numpy(np.stack(self._pixels)), self.targets, images=True)

    def sizes(self, indices: Indices) -> tuple[Sizes, Sizes]:
        heights, widths = self._sizes[:, indices]
        return heights, widths

    def crops(self, indices: Indices, boxes: Boxes, size: int, mirrored: Indices) -> Tensor:
        return crop_all(self.originals(indices), boxes, size, mirrored)
