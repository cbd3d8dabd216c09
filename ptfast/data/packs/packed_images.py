"""Images of a pack: memory-mapped, and fetched by index like a dataset in memory."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ptfast.core.errors import DataError
from ptfast.data.data_fingerprint import describe_part
from ptfast.data.dataset import Splits, image_info
from ptfast.data.decoding.image_decoding import Pixels, decode, mixed_sizes
from ptfast.data.loaders.shared_memory import SharedArrays
from ptfast.data.map_source import TensorSource
from ptfast.data.packs.pack_reader import ROW, Manifest
from ptfast.data.sampling.sampler import Indices
from ptfast.data.sources.image_files import ImageSource
from ptfast.data.transforms.resized_crops import Sizes


class PackedImages(ImageSource):
    """Images of one split of a pack.

    Data of any size opens immediately, and the operating system caches frequently used pages. Images of one
    size form one array, so a batch is one gather.

    Args:
        image_size: side of the square to which images are resized when fetched; None if all have one size.
    """

    columns = ("targets", "_rows", "_ends", "_numbers")
    storage = "pack"

    def __init__(self, folder: Path, split: str, manifest: Manifest, image_size: int | None) -> None:
        self.folder, self.split, self.image_size, self.kind = folder, split, image_size, manifest.kind
        self._digests = [manifest.files[f"{split}.{ending}"][1] for ending in ("index", "bin")]
        self._rows = rows = np.fromfile(folder / f"{split}.index", ROW)
        self._ends, self._numbers = np.cumsum(rows["length"]), np.arange(len(rows))
        self._whole = len(rows)
        self.targets = torch.from_numpy(rows["label"].astype(np.int64))
        sizes = np.unique(self.stored_shapes, axis=0)
        shape = (*sizes[0].tolist(), 3) if len(sizes) == 1 and self.kind == "pixels" else ()
        self.shape = shape if image_size is None or shape == (image_size, image_size, 3) else ()
        """Shape of every image if all have one size and are fetched as stored; otherwise empty."""

    @property
    def decoded_bytes(self) -> int | None:
        if self.image_size is not None:
            return len(self) * self.image_size**2 * 3
        return self.original_bytes

    @property
    def stored_shapes(self) -> NDArray[np.int64]:
        """Height and width of every image in the pack: (images, 2)."""
        return np.stack([self._rows["height"], self._rows["width"]], 1).astype(np.int64)

    @property
    def original_bytes(self) -> int:
        return 3 * int(self.stored_shapes.prod(1).sum())

    def __getstate__(self) -> dict[str, Any]:
        # Each process maps the file itself; pickling the map would copy all of it.
        return {name: value for name, value in self.__dict__.items() if name != "_pixels"}

    def fetch(self, indices: Indices, epoch: int = 0) -> tuple[Tensor, Tensor]:
        if not self.shape:
            return super().fetch(indices, epoch)
        pixels = self._pixels.reshape(-1, *self.shape)[self._numbers[indices]]
        return torch.from_numpy(pixels), self.labels(indices)

    def original(self, index: int) -> Pixels:
        """Return one image as it is stored, (height, width, 3), without a copy unless it must be decoded."""
        row = self._rows[index]
        stored = self._pixels[self._ends[index] - row["length"] : self._ends[index]]
        if self.kind == "pixels":
            return stored.reshape(row["height"], row["width"], 3)
        return decode(stored.tobytes(), self.name_of(index)).pixels

    def name_of(self, index: int) -> str:
        return f"image {self._numbers[index]} of {self.folder / self.split}.bin"

    def sizes(self, indices: Indices) -> tuple[Sizes, Sizes]:
        rows = self._rows[indices]
        return rows["original_height"].astype(np.int64), rows["original_width"].astype(np.int64)

    def to_memory(self, arrays: SharedArrays | None = None) -> TensorSource:
        """Return all images; an unsplit pack of one size is used in place, in memory that ranks share."""
        if not self.shape or not np.array_equal(self._numbers, np.arange(self._whole)):
            return super().to_memory(arrays)
        images = torch.from_numpy(self._pixels.reshape(-1, *self.shape))
        return TensorSource(images, self.targets, images=True)

    def pixel_sums(self, indices: Indices) -> tuple[int, Tensor, Tensor] | None:
        """Return count, sums and sums of squares of the pixels of samples, per channel, from the index."""
        if self.image_size is not None and bool((self.stored_shapes != self.image_size).any()):
            return None
        return pixel_sums(self._rows[indices])

    def contents(self) -> list[Any]:
        return describe_part(len(self), "images", *self._digests)

    @property
    def num_converted(self) -> int:
        """Number of images that were not 8-bit RGB."""
        return int(self._rows["converted"].sum())

    @cached_property
    def _pixels(self) -> Pixels:
        # Copy on write, because torch has no read-only tensors. Viewed as a plain array, because indexing
        # numpy's memmap class takes several times as long.
        return np.memmap(self.folder / f"{self.split}.bin", np.uint8, "c").view(np.ndarray)


def pixel_sums(rows: NDArray[Any]) -> tuple[int, Tensor, Tensor]:
    """Return count, sums and sums of squares of pixels, per channel, from the images' index entries."""
    count = int((rows["height"].astype(np.int64) * rows["width"]).sum())
    sums, squares = (torch.from_numpy(rows[name].sum(0)).double() for name in ("sums", "squares"))
    return count, sums, squares


def load_packed_images(folder: Path, manifest: Manifest, image_size: int | None) -> Splits:
    """Return the splits of a pack of images, like `ImageFolder` for a folder."""
    if manifest.kind == "tokens":
        hint = f"Use data=text_file data.path={folder}"
        raise DataError("D001", "is a pack of text", key="data.root", value=folder, suggestion=hint)
    sources = {split: PackedImages(folder, split, manifest, image_size) for split in manifest.splits}
    shape = sources["train"].fetch(np.array([0]))[0].shape[1:]
    for source in sources.values() if image_size is None else ():
        # Reject images of another size now, not in the middle of an epoch.
        stored = source.stored_shapes
        other = np.flatnonzero((stored != shape[:2]).any(1))
        if len(other):
            raise mixed_sizes(source.name_of(other[0]), stored[other[0]].tolist(), shape[:2])
    info = image_info((shape[2], shape[0], shape[1]), class_names=tuple(manifest.class_names))
    key = f"{folder.resolve()} {image_size} {manifest.files}"
    stored = "JPEG" if manifest.kind == "jpeg" else "pixels"
    words = [f"packed as {stored}" + (f" at {manifest.size}" if manifest.size else "")]
    if converted := sum(source.num_converted for source in sources.values()):
        words.append(f"{converted:,} images that are not 8-bit RGB were converted")
    if count := len(manifest.skipped):
        words.append(f"without {count:,} file{'s' * (count > 1)} that could not be read")
    return Splits.of(info, sources, ", ".join(words), cache_key=lambda: key)
