"""PIL images as the model sees them: 8-bit RGB, in a square. The exported `load.py` copies this code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ptfast.data.transforms.resized_crops import resize


class UnknownScaleError(ValueError):
    """An image's values do not show which one is white."""


def rgb_pixels(image: Any) -> Tensor:
    """Convert a PIL image to uint8 (height, width, 3); UnknownScaleError if its white is unknown.

    Alpha is dropped. Of 16 bits, the upper 8 are kept. Floats are 0 to 1, other integers 0 to 255.
    """
    mode, tiles = image.mode, getattr(image, "tile", ())
    layout = str(tiles[0][3]) if tiles else ""
    if mode[0] not in "IF":
        # PIL warns of transparent palettes unless they become RGBA first.
        image = image.convert("RGBA") if mode == "P" and "transparency" in image.info else image
        image = image if image.mode == "RGB" else image.convert("RGB")
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        pixels = pixels.view(image.height, image.width, 3)
        # PIL has dropped the lower 8 of 16 bits.
        if (";16" in layout or "65535" in layout) and pixels.max() <= 16:
            raise UnknownScaleError("contains 16-bit values near black: a dark image, or 12 bits in 16")
        return pixels
    tags = getattr(image, "tag_v2", {})
    kind, dtype = ("floats", torch.float32) if mode == "F" else ("integers", torch.int32)
    values = torch.frombuffer(bytearray(image.convert(mode[0]).tobytes()), dtype=dtype)
    low, high = (bound.item() for bound in values.aminmax())
    white = 255 if mode == "I" or (high > 1 and torch.equal(values, values.round())) else 1
    if mode[1:] or (mode == "I" and image.format in ("PNG", "PPM")):
        white = 4095 if tags.get(258) == (12,) else 65535
    if not 0 <= low <= high <= white:
        raise UnknownScaleError(f"contains {kind} from {low:g} to {high:g}, so its white is unknown")
    if white == 65535 and ";16" in layout + mode and 0 < high < 4096:
        raise UnknownScaleError(f"contains 16-bit values up to {high:,}: a dark image, or 12 bits in 16")
    grey = ((values * 255).round() if white == 1 else values.int() * 256 // (white + 1)).byte()
    grey = 255 - grey if tags.get(262) == 0 else grey  # TIFFs may count from white to black
    return grey.view(image.height, image.width, 1).repeat(1, 1, 3)


def in_square(pixels: Tensor, size: int, resize: Callable[..., Tensor] = resize) -> Tensor:
    """Resize the shorter side to `size` (bilinear, antialiased, unless `resize` does) and crop the center."""
    height, width = pixels.shape[:2]
    if height == width == size:
        return pixels
    # Cut off the ends of a narrow image first: enlarged, they could fill memory, only to be cropped.
    most = max(16 * size, 2**24 // size) * min(height, width) // size
    top, left = max(0, height - most) // 2, max(0, width - most) // 2
    pixels = resize_shorter(pixels[top : top + most, left : left + most], size, resize)
    top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
    return pixels[top : top + size, left : left + size].contiguous()


def resize_shorter(pixels: Tensor, size: int, resize: Callable[..., Tensor] = resize) -> Tensor:
    """Resize the shorter side to `size`: uint8 (height, width, channels)."""
    height, width = pixels.shape[:2]
    scale = size / min(height, width)
    return resize(pixels, max(size, round(height * scale)), max(size, round(width * scale)))
