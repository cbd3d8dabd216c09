"""Random crops and flips of images that lie on the device, a whole batch at once."""

from __future__ import annotations

import torch
from torch import Tensor

from ptfast.data.transforms.augment.augment_plan import Augment


class ResidentImages:
    """Images on a device from which cropped and mirrored batches are gathered.

    Args:
        images: (samples, height, width, channels), on the device; uint8, but for masks.
        padding: pixels on each side, with which they are kept.
        fill: what these have, black or a label.

    Cost: the memory of the padded images. Mirroring is a matter of the order in which columns are gathered.
    """

    def __init__(self, images: Tensor, padding: int, fill: int = 0) -> None:
        samples, height, width, channels = images.shape
        self._height, self._width = height, width
        if padding:
            padded = images.new_full((samples, height + 2 * padding, width + 2 * padding, channels), fill)
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
        return samples * (height + pad) * (width + pad) * channels * images.element_size()

    def gather(self, index: Tensor, top: Tensor, left: Tensor, flipped: Tensor) -> Tensor:
        """Crops of the images `index`, mirrored first where `flipped` is 1.

        Args:
            index, top, left, flipped: int64 (batch,), on the device; a corner is one of the padded image.

        Returns:
            (batch, height, width, channels), of their type.
        """
        rows = (index * self._padded_height + top)[:, None] + self._down
        columns = left[:, None] + self._across
        # Column x of the mirror image is the one as far from the other end.
        columns = torch.where(flipped[:, None] > 0, self._last_column - columns, columns)
        return self._rows[rows[:, :, None], columns[:, None, :]]

    def cut(
        self,
        index: Tensor,
        top: Tensor,
        bottom: Tensor,
        left: Tensor,
        right: Tensor,
        flipped: Tensor,
        size: int,
    ) -> Tensor:
        """Boxes of the images `index`, scaled to squares and mirrored then where `flipped` is 1.

        A pixel of a crop is a weighted sum over a box, across and then down. Both are products of matrices,
        one for each image, so that boxes of any sizes are one operation.

        Args:
            index, flipped: int64 (batch,), on the device.
            top, bottom, left, right: first row of a box and the row behind it, columns likewise.
            size: side of a square.

        Returns:
            uint8 (batch, size, size, channels): those of `crops.resized_crop`, but for a rare step
            of 1; two where products are of tf32.
        """
        images = self._samples.index_select(0, index)
        batch, height, width, channels = images.shape
        across, down = _weights(left, right, width, size), _weights(top, bottom, height, size)
        across = torch.where(flipped[:, None, None] > 0, across.flip(1), across)
        columns = images.transpose(1, 2).reshape(batch, width, height * channels).float()
        # Bytes in between, as there.
        narrow = (across @ columns).add_(0.5).floor_().clamp_(max=255).view(batch, size, height, channels)
        rows = narrow.transpose(1, 2).reshape(batch, height, size * channels)
        return (down @ rows).add_(0.5).clamp_(max=255).to(torch.uint8).view(batch, size, size, channels)

    def take(self, index: Tensor) -> Tensor:
        """The images `index` as they are."""
        return self._samples.index_select(0, index)


def _weights(start: Tensor, end: Tensor, length: int, size: int) -> Tensor:
    """Weights of each pixel of a line in each of `size` that stand for its part from `start` to `end`.

    Bilinear and antialiased: a triangle around the centre, as wide as two of the coarser pixels. Weights are
    those that torch resizes bytes by on a CPU, multiples of a power of 2 in 15 bits: with 8 bits of a pixel,
    sums of float32 are exact.

    Args:
        start, end: int64 (batch,).
        length: of the whole line.

    Returns:
        float32 (batch, size, length), rows of which add up to about 1.
    """
    start, end = start[:, None, None], end[:, None, None]
    scale = (end - start).double() / size
    centres = start + scale * (torch.arange(size, device=start.device)[:, None] + 0.5)
    pixels = torch.arange(length, device=start.device)
    weights = (1 - (pixels + 0.5 - centres).abs() / scale.clamp(min=1)).clamp(min=0)
    weights = weights * ((start <= pixels) & (pixels < end))
    weights /= weights.sum(2, keepdim=True)
    step = torch.exp2(1 - torch.ceil(torch.log2((2**15 - 0.5) / weights.amax((1, 2), keepdim=True))))
    return (weights / step).add_(0.5).floor_().mul_(step).float()
