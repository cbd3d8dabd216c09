# ruff: noqa: N803
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
"""A Triton kernel that gathers, flips, recolors, erases and normalizes a batch of images."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ptfast.data.transforms.augment_plan import Augment
from ptfast.data.transforms.image_operations import gray_weights

_BITS = tl.constexpr(16)
_HALF = tl.constexpr(1 << 15)
_SHIFT = tl.constexpr(1 << 32)
"""Offset that keeps quotients positive during division: negative ones would round differently."""


@triton.jit
def _place(source, starts, stride):
    return source + tl.load(starts + tl.program_id(0)) * stride


@triton.jit
def _gray(pixels, weights, stride, inside, CHANNELS: tl.constexpr):
    gray = tl.where(inside, _HALF, 0)
    for channel in tl.static_range(CHANNELS):
        value = tl.load(pixels + channel * stride, mask=inside, other=0)
        gray += value.to(tl.int32) * tl.load(weights + channel)
    return gray >> _BITS


@triton.jit
def _sum_gray(
    out, source, starts, weights, of_image, of_row, of_pixel, of_channel, num_pixels, width,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = _place(source, starts, of_image)
    total = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, num_pixels, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        pixels = first + place // width * of_row + place % width * of_pixel
        total += _gray(pixels, weights, of_channel, place < num_pixels, CHANNELS)
    tl.store(out + tl.program_id(0), tl.sum(total.to(tl.int64), 0))


@triton.jit
def _change(
    out, source, starts, flipped, grays, factors, boxes, constants, weights,
    of_image, of_row, of_pixel, of_channel, to_pixel, to_channel, num_pixels, width,
    CHANNELS: tl.constexpr, FLIPS: tl.constexpr, COLORS: tl.constexpr, CUTS: tl.constexpr,
    NORMALIZES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_pixels
    y, x = place // width, place % width
    column = x
    if FLIPS:
        column = tl.where(tl.load(flipped + image) > 0, width - 1 - x, x)
    pixels = _place(source, starts, of_image) + y * of_row + column * of_pixel
    target = out + image.to(tl.int64) * num_pixels * CHANNELS + place * to_pixel
    if COLORS:
        own, gray = tl.load(factors + 3 * image), tl.load(factors + 3 * image + 1)
        light = tl.load(grays + image) * tl.load(factors + 3 * image + 2)
        count = tl.cast(num_pixels, tl.int64)
        mean = ((light + count * _SHIFT) // count - _SHIFT).to(tl.int32)
        offset = _gray(pixels, weights, of_channel, inside, CHANNELS) * gray + mean + _HALF
    if CUTS:
        box = boxes + 4 * image
        hidden = (y >= tl.load(box)) & (y < tl.load(box + 1))
        hidden &= (x >= tl.load(box + 2)) & (x < tl.load(box + 3))
    for channel in tl.static_range(CHANNELS):
        value = tl.load(pixels + channel * of_channel, mask=inside, other=0)
        if COLORS:
            value = tl.minimum(tl.maximum((value.to(tl.int32) * own + offset) >> _BITS, 0), 255)
        value = value.to(tl.float32)
        if CUTS:
            value = tl.where(hidden, tl.load(constants + 2 * CHANNELS + channel), value)
        if NORMALIZES:
            mean_of_channel = tl.load(constants + channel)
            value = (value - mean_of_channel) * tl.load(constants + CHANNELS + channel)
        tl.store(target + channel * to_channel, value.to(out.dtype.element_ty), mask=inside)


def build_kernel(
    augment: Augment,
    mean_and_factor: tuple[Tensor, Tensor] | None,
    channels: int,
    device: torch.device,
    dtype: torch.dtype,
    layout: torch.memory_format,
) -> Callable[..., Tensor]:
    """Bind `change_images` to the constants of a run, which are sent to `device` once.

    Args:
        mean_and_factor: mean and factor of each channel; None for pixels that are normalized already.
    """
    fill = torch.tensor(augment.fill or [0] * channels, dtype=torch.float32, device=device)
    constants = torch.stack([*(each.flatten() for each in mean_and_factor or (fill, fill)), fill])
    weights = torch.tensor(gray_weights(channels), dtype=torch.int32, device=device)
    return partial(
        change_images,
        constants=constants,
        weights=weights,
        normalizes=mean_and_factor is not None,
        dtype=dtype,
        layout=layout,
    )


def change_images(
    crops: Tensor,
    starts: Tensor,
    flipped: Tensor | None = None,
    *,
    drawn: dict[str, Tensor],
    constants: Tensor,
    weights: Tensor,
    normalizes: bool,
    dtype: torch.dtype,
    layout: torch.memory_format,
) -> Tensor:
    """Return model inputs, (batch, channels, height, width), with the same bits as separate operators.

    Every byte is read once, or twice if colors change, and every result is written once.

    Args:
        crops: (places, height, width, channels), of any strides; `starts` are the int64 indices of the
            batch's images, and `flipped` is 1 for images to mirror.
        drawn: `color` and `erased` of `Augment.draw_changes`.
        constants: mean, factor and fill of each channel, float32.

    Cost: one kernel, and one more for colors, which need the mean gray of an image first.
    """
    _, height, width, channels = crops.shape
    batch, size = len(starts), (height * width, width)
    out = torch.empty(
        (batch, channels, height, width), dtype=dtype, device=crops.device, memory_format=layout
    )
    color, erased = drawn.get("color"), drawn.get("erased")
    block = min(1024, triton.next_power_of_2(height * width))
    how: Any = {"CHANNELS": channels, "BLOCK": block}
    grays = weights  # the kernel does not read them without colors
    if color is not None:
        grays = torch.empty(batch, dtype=torch.int64, device=crops.device)
        _sum_gray[batch,](grays, crops, starts, weights, *crops.stride(), *size, **how)
    given = [weights if each is None else each for each in (flipped, grays, color, erased)]
    how |= {"FLIPS": flipped is not None, "COLORS": color is not None, "CUTS": erased is not None}
    strides = (*crops.stride(), out.stride(3), out.stride(1))
    _change[batch, triton.cdiv(height * width, block)](
        out, crops, starts, *given, constants, weights, *strides, *size, NORMALIZES=normalizes, **how
    )
    return out
