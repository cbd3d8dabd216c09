"""Images of any sizes, decoded once and held in memory as they are, for crops of the originals."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ptfast.core.errors import ConfigError
from ptfast.data.decoding.image_decoding import Pixels, fit, mixed_sizes
from ptfast.data.map_source import MapSource, TensorSource, as_tensor
from ptfast.data.sampling.order import Indices
from ptfast.data.transforms.resized_crops import Boxes, Sizes, crop_all


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
        """The same as one tensor.

        Raises:
            ConfigError: C011 for images that are stored in several sizes.
        """
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
