"""Images with class masks: `images/` and `masks/`, alone or in `train/`, `val/` and `test/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ptfast.core.durations import Duration
from ptfast.core.errors import DataError
from ptfast.core.protocols import DataInfo
from ptfast.core.sections.section import Count
from ptfast.data.data_fingerprint import describe_part
from ptfast.data.dataset import ReadsAsKnown, Splits
from ptfast.data.decoding.image_decoding import Pixels, decode_file, fit, in_threads, mixed_sizes, opened
from ptfast.data.sampling.sampler import Indices
from ptfast.data.sources.class_folders import PassedOver, image_files, splits_among
from ptfast.data.sources.image_files import ImageSource, set_shapes

Pair = tuple[str, str]


class MaskFolder(ReadsAsKnown):
    """Images in `images/` and masks of the same names in `masks/`; their suffixes may differ.

    Args:
        root: folder of `train/` (and `val/`, `test/`), each with `images/` and `masks/`, or of these two.
        image_size: side in pixels that images and masks are brought to: shorter side resized, center
            cropped. null if all have one size.
        num_classes: number of classes, if the labels that occur do not show it. Labels are the gray values of
            a mask, or the indices into its palette.

    Raises:
        DataError: D001 to D003 by `load` when the tree does not fit, D005 for a file that cannot be read or a
            mask whose size differs from its image.
    """

    name = "mask_folder"

    def __init__(self, root: str, image_size: Count | None = None, num_classes: Count | None = None) -> None:
        self.root, self.image_size, self.num_classes = Path(root).expanduser(), image_size, num_classes

    def load(self, *, val: Duration, seed: int) -> Splits:
        inside = [path.name for path in self.root.glob("*") if path.is_dir()]
        folders, passed = {"train": "."} | self.complete(splits_among(inside)), PassedOver()
        sources = {
            split: MaskedImages(_pairs(self.root / folder, passed), self.image_size)
            for split, folder in folders.items()
        }
        shape = set_shapes(sources)
        info = DataInfo(
            kind="image",
            task="semantic_segmentation",
            task_reason="a mask for each image",
            target_kind="mask",
            num_classes=self.num_classes,
            input_shape=shape,
            in_channels=shape[0],
        )
        return Splits.of(info, sources, passed.note)


class MaskedImages(ImageSource):
    """Images and masks from pairs of files, decoded on every fetch."""

    columns = ("pairs", "_numbers")
    crops_originals = False

    def __init__(self, pairs: list[Pair], image_size: int | None) -> None:
        self.pairs, self.image_size = pairs, image_size
        self.paths = [str(image) for image, _ in pairs]
        self._numbers = np.arange(len(pairs))

    def contents(self) -> list[Any]:
        return describe_part(len(self), "images", *(Path(file).name for pair in self.pairs for file in pair))

    def fetch(self, indices: Indices, epoch: int = 0) -> tuple[Tensor, Tensor]:
        def read(place: int) -> tuple[Pixels, Pixels]:
            image_file, mask_file = self.pairs[int(indices[place])]
            pixels, mask = decode_file(image_file).pixels, read_mask(mask_file)
            if mask.shape != pixels.shape[:2]:
                shapes = ("x".join(map(str, array.shape[1::-1])) for array in (mask, pixels))
                raise DataError("D005", "is {}, and its image is {}".format(*shapes), key=mask_file)
            if self.image_size is not None:
                pixels = fit(pixels, self.image_size)
                mask = fit(mask[..., None], self.image_size, _resize_nearest)[..., 0]
            if self.shape and pixels.shape != self.shape:
                raise mixed_sizes(image_file, pixels.shape, self.shape)
            return pixels, mask

        columns = zip(*in_threads(len(indices), read), strict=True)
        images, masks = (torch.from_numpy(np.stack(column)) for column in columns)
        return self.label_check((images, masks), self._numbers[indices].tolist())


def read_mask(file: str) -> Pixels:
    """Return the class number of each pixel, uint8 (height, width): gray values, or palette indices."""
    with opened(file, file) as mask:
        if mask.mode in ("L", "P", "1"):
            return np.array(mask, np.uint8)
        mode = mask.mode
        if mode.startswith("I"):  # whole numbers of 16 or 32 bits
            numbers = np.array(mask, np.int64)
            if numbers.min() >= 0 and numbers.max() <= 255:
                return numbers.astype(np.uint8)
    what, hint = f"has pixels of mode {mode}, not class numbers", "Save it as grey values, or with a palette"
    raise DataError("D005", what, key=file, suggestion=hint)


def _resize_nearest(mask: Tensor, height: int, width: int) -> Tensor:
    """Resize a mask (height, width, 1) by the nearest pixel."""
    resized = F.interpolate(mask[None, None, ..., 0], (height, width), mode="nearest-exact")
    return resized[0, 0, ..., None]


def _pairs(folder: Path, passed: PassedOver) -> list[Pair]:
    """Return the pairs of image and mask files, sorted by the image's path."""
    found: dict[str, dict[str, str]] = {}
    for part in ("images", "masks"):
        if not (folder / part).is_dir():
            what, hint = f"has no folder {part}/", "Put images/ and masks/ into it, or into train/ and val/"
            raise DataError("D001", what, key="data.root", value=folder, suggestion=hint)
        files = image_files(folder / part, passed)
        found[part] = {str(Path(file).relative_to(folder / part).with_suffix("")): file for file in files}
    images, masks = found["images"], found["masks"]
    if not images:
        raise DataError("D002", "contains no images", key="data.root", value=folder / "images")
    if missing := sorted(images.keys() - masks.keys()):
        what = f"{len(missing):,} of {len(images):,} images have no mask, the first is {missing[0]}"
        raise DataError("D003", what, key="data.root", value=folder / "masks")
    return [(file, masks[name]) for name, file in images.items()]
