"""Random crops and flips of images that lie on the device, as one gather of pixels for a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from ptfast.data.augment.plan import Augment


class ResidentImages:
    """Images on a device from which cropped and mirrored batches are gathered.

    Args:
        images: uint8 (samples, height, width, channels), on the device.
        padding: black pixels on each side, with which they are kept.

    Cost: the memory of the padded images. Mirroring is a matter of the order in which columns are gathered.
    """

    def __init__(self, images: Tensor, padding: int) -> None:
        samples, height, width, channels = images.shape
        self._height, self._width = height, width
        if padding:
            padded = images.new_zeros(samples, height + 2 * padding, width + 2 * padding, channels)
            padded[:, padding : padding + height, padding : padding + width] = images
            images = padded
        self._samples, self._last_column = images, images.shape[2] - 1
        self._padded_height = images.shape[1]
        # Rows of all images one below the other: an image's number and a row in it are one index.
        self._rows = images.reshape(-1, *images.shape[2:])
        self._down = torch.arange(height, device=images.device)
        self._across = torch.arange(width, device=images.device)

    @staticmethod
    def nbytes(images: Tensor, augment: Augment) -> int:
        """Bytes that `images` take with their padding."""
        samples, height, width, channels = images.shape
        pad = 2 * augment.crop_padding
        return samples * (height + pad) * (width + pad) * channels

    def gather(self, index: Tensor, top: Tensor, left: Tensor, flipped: Tensor) -> Tensor:
        """Crops of the images `index`, mirrored first where `flipped` is 1.

        Args:
            index, top, left, flipped: int64 (batch,), on the device; a corner is one of the padded image.

        Returns:
            uint8 (batch, height, width, channels).
        """
        rows = (index * self._padded_height + top)[:, None] + self._down
        columns = left[:, None] + self._across
        # Column x of the mirror image is the one as far from the other end.
        columns = torch.where(flipped[:, None] > 0, self._last_column - columns, columns)
        return self._rows[rows[:, :, None], columns[:, None, :]]

    def take(self, index: Tensor) -> Tensor:
        """The images `index` as they are."""
        return self._samples.index_select(0, index)
