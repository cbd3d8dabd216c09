"""Augmentation policies as in torchvision: the operations on each image, and their magnitudes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ptfast.data.sampling import counter_draws
from ptfast.data.transforms import AugmentSection, image_operations
from ptfast.data.transforms.image_operations import Floats, sent

OPERATIONS = (
    *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Contrast"),
    *("Color", "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize", "Invert"),
)
"""Torchvision's names of operations; draws are indices. Operations 1 to 9 get a random sign."""
_TOGETHER = ((1, 2, 3, 4, 5), (6, 7, 8), (9,), (10,), (11, 14), (12,), (13,))
"""Groups of operations that are computed together, for all images that draw any of them."""
_AFFINE, _COLOR, _SHARPEN, _POSTERIZE, _SOLARIZE, _, _EQUALIZE = _TOGETHER
SPACES = {
    "trivial": (31, 0.99, 32, 135, 0.99, 8, 2),
    "rand": (31, 0.3, 150 / 331, 30, 0.9, 8, 4),
    "auto": (10, 0.3, 150 / 331, 30, 0.9, 8, 4),
}
"""The number of magnitudes; the largest shear, shift (a fraction of the side; pixels above 1), rotation and
color change; the bits that posterizing leaves at the smallest and at the largest magnitude."""


def draw_policy(
    augment: AugmentSection, draw: Callable[[int], Floats], shape: Sequence[int]
) -> NDArray[np.float64]:
    """Draw the operations of each image in order: index and magnitude, (batch, operations, 2).

    `draw` returns numbers in [0, 1) for a stream.

    Source: Mueller, Hutter 2021, arXiv:2103.10158; Cubuk, Zoph, Shlens, Le 2019, arXiv:1909.13719; Cubuk et
    al. 2018, arXiv:1805.09501.
    """
    policy = str(augment.policy)
    count = {"trivial": 1, "rand": augment.rand_ops, "auto": 2}[policy]
    streams = counter_draws.POLICY + np.arange(4 * count).reshape(4, count)
    kind, level, sign, chance = (np.stack([draw(int(each)) for each in row], 1) for row in streams)
    # Only AutoAugment inverts.
    numbers = np.floor(kind * (len(OPERATIONS) - 1)).astype(int)
    levels = np.floor(level * SPACES[policy][0]).astype(int)
    if policy == "rand":
        levels[:] = augment.rand_magnitude
    elif policy == "auto":
        from torchvision.transforms import AutoAugment, AutoAugmentPolicy

        pairs = AutoAugment(AutoAugmentPolicy(augment.auto_table)).policies
        steps = [[(OPERATIONS.index(name), p, level or 0) for name, p, level in pair] for pair in pairs]
        rows = np.array(steps)[np.floor(kind[:, 0] * len(pairs)).astype(int)]
        found, chances, levels = rows.transpose(2, 0, 1)
        numbers, levels = np.where(chance < chances, found, 0).astype(int), levels.astype(int)
    magnitudes = strengths(policy, shape)[numbers, levels]
    magnitudes[(numbers <= 9) & (sign < 0.5)] *= -1
    return np.stack([numbers, magnitudes], 2)


def strengths(policy: str, shape: Sequence[int]) -> NDArray[np.float64]:
    """Return the strength of each operation at each magnitude, (operations, magnitudes)."""
    count, shear, shift, degrees, color, bits, fewest = SPACES[policy]
    level, (height, width) = np.linspace(0, 1, count), (shift * (1 if shift > 1 else side) for side in shape)
    signed = np.outer([0, shear, shear, width, height, degrees, *[color] * 4], level)
    return np.stack([*signed, np.rint(bits - (bits - fewest) * level), 255 * (1 - level), *[0 * level] * 3])


def apply_in_turn(images: Tensor, drawn: Tensor, fill: int | None = None) -> Tensor:
    """Apply operations `drawn` by `draw_policy` to images (batch, height, width, channels) uint8.

    With `fill`, they are masks, which only move. `drawn` stays on the host, which groups images by operation.
    Pixels match torchvision's up to rounding.
    """
    for numbers, magnitudes in drawn.permute(1, 2, 0).numpy():
        images = images.clone()
        for kind in _TOGETHER if fill is None else (_AFFINE,):
            chosen = numbers == np.array(kind)[:, None]
            index = np.flatnonzero(chosen.any(0))
            if len(index):
                where, amounts = sent(index, images.device), (chosen * magnitudes)[:, index]
                images[where] = _changed(kind, images[where], amounts, fill or 0)
    return images


def _changed(kind: tuple[int, ...], images: Tensor, amounts: Floats, fill: int) -> Tensor:
    """Apply operations of one kind to images, by `amounts` (operations of the kind, batch)."""
    from torchvision.transforms.v2 import functional as V

    device, planes = images.device, images.permute(0, 3, 1, 2)
    if kind == _AFFINE:
        shear_x, shear_y, shift_x, shift_y, degrees = amounts
        turns = np.radians(-degrees), np.ones(len(images)), np.trunc(shift_y), np.trunc(shift_x)
        moves = image_operations.affine_coefficients(*turns, images.shape[1:3], (shear_y, shear_x))
        return image_operations.affine(images, sent(moves, device), "nearest", fill)
    if kind == _COLOR:
        return image_operations.recolor(images, sent(image_operations.color_factors(*(1 + amounts)), device))
    amount = sent(amounts[0].astype(np.float32), device).view(-1, 1, 1, 1)
    if kind == _SOLARIZE:
        return torch.where(images >= amount, ~images, images)
    if kind == _POSTERIZE:
        return images & (256 - 2 ** (8 - amount)).to(torch.uint8)
    if kind == _SHARPEN:
        smooth = V.adjust_sharpness(planes, 0.0).permute(0, 2, 3, 1)
        return (images * (1 + amount) - smooth * amount).clamp_(0, 255).to(torch.uint8)
    return (V.equalize if kind == _EQUALIZE else V.autocontrast)(planes).permute(0, 2, 3, 1)
