"""Changes to the pixels of a batch, on whatever device it is: turned, recoloured, a square of each hidden."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

GREY = (19595, 38470, 7471)
"""Parts of red, green and blue in grey, in 1/65536: the weights of ITU-R 601, as PIL has them."""
_BITS = 16
_HALF = 1 << (_BITS - 1)

Figures = NDArray[np.float64]


def bends(
    angle: Figures, scale: Figures, shift_y: Figures, shift_x: Figures, shape: tuple[int, int]
) -> NDArray[np.float32]:
    """Where the pixels of a bent image come from: six coefficients each, for `bend`.

    Images are scaled and turned around their centre, clockwise, then shifted.

    Args:
        angle: in radians. `scale`: of lengths. `shift_y`, `shift_x`: in pixels. All (batch,).
        shape: (height, width) of the images.
    """
    height, width = shape
    cosine, sine = np.cos(angle) / scale, np.sin(angle) / scale
    x = np.stack([cosine, sine, -cosine * shift_x - sine * shift_y], 1) * (2 / width)
    y = np.stack([-sine, cosine, sine * shift_x - cosine * shift_y], 1) * (2 / height)
    return np.concatenate([x, y], 1).astype(np.float32)


def bend(images: Tensor, coefficients: Tensor) -> Tensor:
    """Images turned, scaled and shifted, each by its own amount, with bilinear weights; black from outside.

    Args:
        images: uint8 (batch, height, width, channels).
        coefficients: of `bends`, (batch, 6).

    Cost: some 16 us for an image of 32x32 on one core.
    """
    planes = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    sampled = F.grid_sample(planes, _grid(coefficients, images.shape[1:3]), align_corners=False)
    bent = torch.empty_like(images)
    bent.permute(0, 3, 1, 2).copy_(sampled.round_())
    return bent


def bend_masks(masks: Tensor, coefficients: Tensor, fill: int) -> Tensor:
    """Masks bent as `bend` does their images, by the nearest pixel.

    Args:
        masks: labels (batch, height, width), of a type that holds `fill`.
        coefficients: of `bends`, (batch, 6).
        fill: label of what comes from outside.
    """
    # Zeros come from outside; labels are exact in float32 up to 2**24.
    planes = masks[:, None].float() - fill
    grid = _grid(coefficients, masks.shape[1:3])
    return (F.grid_sample(planes, grid, mode="nearest", align_corners=False)[:, 0] + fill).to(masks.dtype)


def _grid(coefficients: Tensor, shape: Sequence[int]) -> Tensor:
    """Where each pixel of images of `shape` (height, width) comes from, for `grid_sample`."""
    height, width = shape
    device = coefficients.device
    x = torch.arange(width, device=device, dtype=torch.float32).sub_((width - 1) / 2)
    y = torch.arange(height, device=device, dtype=torch.float32).sub_((height - 1) / 2).view(-1, 1)
    of_x, of_y, start = coefficients.view(-1, 2, 3, 1, 1).unbind(2)
    # One product and one sum at a time: a matrix product may round otherwise with other threads.
    return torch.stack([of_x[:, i] * x + (of_y[:, i] * y + start[:, i]) for i in (0, 1)], -1)


def colours(brightness: Figures, contrast: Figures, saturation: Figures) -> NDArray[np.int32]:
    """The factors of `recolour`: int32 (batch, 3), in 1/65536.

    Brightness multiplies pixels, contrast their distance from the mean grey of the image, saturation that
    from the grey of the pixel. One after the other they are linear in pixel, grey and mean grey, so that all
    three come down to one factor for each of these.

    Args:
        brightness, contrast, saturation: factors, (batch,), 1 for no change.
    """
    of_pixel = brightness * contrast * saturation
    of_grey = brightness * contrast * (1 - saturation)
    of_mean = brightness * (1 - contrast)
    return np.rint(np.stack([of_pixel, of_grey, of_mean], 1) * (1 << _BITS)).astype(np.int32)


def recolour(images: Tensor, factors: Tensor) -> Tensor:
    """Images of other brightness, contrast and saturation, each by its own amount.

    In whole numbers, and rounded only once: the same bits on every device and with any number of threads.

    Args:
        images: uint8 (batch, height, width, channels); three channels are red, green and blue, others weigh
            alike in grey.
        factors: of `colours`, (batch, 3).

    Cost: some 15 us for an image of 32x32 on one core.
    """
    size, height, width, channels = images.shape
    # One plane for each channel: a factor then holds for long runs of memory.
    planes = images.permute(3, 0, 1, 2).to(torch.int32, memory_format=torch.contiguous_format)
    weights = GREY if channels == 3 else [(1 << _BITS) // channels] * channels
    grey = torch.full_like(planes[0], _HALF)
    for plane, weight in zip(planes, weights, strict=True):
        grey.add_(plane, alpha=weight)
    grey >>= _BITS
    of_pixel, of_grey, of_mean = factors.view(size, 3, 1, 1).unbind(1)
    mean = (grey.sum((1, 2), keepdim=True) * of_mean).div_(height * width, rounding_mode="floor")
    offset = grey.mul_(of_grey).add_(mean.to(torch.int32)).add_(_HALF)
    planes.mul_(of_pixel).add_(offset)
    planes >>= _BITS
    return planes.clamp_(0, 255).to(torch.uint8).permute(1, 2, 3, 0).contiguous()


def cut_out(images: Tensor, corners: Tensor, side: int, fill: Sequence[int]) -> Tensor:
    """Images of each of which a square is hidden, as far as it lies inside.

    Args:
        images: (batch, height, width, channels), uint8 or of a type that holds `fill`.
        corners: top and left of the squares, (batch, 2), whose centres lie inside.
        side: of the squares, in pixels.
        fill: what is seen there instead, by channel; black if empty.

    Source: DeVries, Taylor 2017, arXiv:1708.04552.
    """
    size, height, width, channels = images.shape
    device = images.device
    steps = torch.arange(side, device=device)
    # What lies outside is moved to the border, of which a square that reaches beyond it hides as much.
    y, x = (
        (corner[:, None] + steps).clamp_(0, most - 1)
        for corner, most in zip(corners.unbind(1), (height, width), strict=True)
    )
    # Filled on the device: a tensor made on the host would have to be copied there.
    shown = [torch.full((1,), value, dtype=images.dtype, device=device) for value in fill or [0] * channels]
    images = images.clone()
    images[torch.arange(size, device=device)[:, None, None], y[:, :, None], x[:, None]] = torch.cat(shown)
    return images
