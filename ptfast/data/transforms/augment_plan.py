"""The plan of augmentation: changes to training images, and the random draws for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ptfast.core.errors import ConfigError
from ptfast.core.protocols import DataInfo
from ptfast.data import transforms
from ptfast.data.sampling import counter_draws
from ptfast.data.sampling.sampler import Indices, Share

_CACHED_PIXELS = 1 << 17
"""Pixels that the host changes at a time, so that intermediate results stay in its caches."""


class Augment(transforms.AugmentSection):
    """Changes to training images: mirrored, cropped, bent, coloured, a square cut out, in this order.

    A resized crop of the original image comes first. All draws are functions of (seed, epoch, index). Crop
    and flip are part of gathering a batch; `change` does the rest.
    """

    seed: int = 0
    size: int = 0
    """Side in pixels that a resized crop is scaled to."""
    fill: tuple[float, ...] = ()
    """The colour of a cutout, by channel; black if not given."""
    mask_fill: int | None = None
    """The label of pixels from outside an image or cut out of it; None if targets do not change."""

    def __bool__(self) -> bool:
        return self.moves or self.changes

    @property
    def moves(self) -> bool:
        """True if images are cropped or mirrored."""
        return self.crop_padding > 0 or bool(self.flip) or self.resized_crop is not None

    @property
    def changes(self) -> bool:
        """True if images change after a batch is gathered."""
        return self.bends or self.colours or self.cutout > 0

    @property
    def bends(self) -> bool:
        return max(self.rotation_degrees, self.translation, self.scaling) > 0

    @property
    def hides(self) -> bool:
        """True if some pixels may show nothing of the image."""
        return (self.crop_padding > 0 and not self.reflects) or self.bends or self.cutout > 0

    @property
    def reflects(self) -> bool:
        return self.crop_padding > 0 and self.crop_padding_mode == "reflect"

    @property
    def colours(self) -> bool:
        return max(self.brightness, self.contrast, self.saturation) > 0

    def draw(self, share: Share) -> tuple[Indices, Indices, Indices]:
        """(top, left, flipped) of each image: corner of its crop in the padded image, mirrored first."""
        none = np.zeros(len(share.indices), np.int64)
        top = left = flipped = none
        if self.crop_padding:
            high = 2 * self.crop_padding + 1
            top = self._integers(share, counter_draws.CROP_Y, high)
            left = self._integers(share, counter_draws.CROP_X, high)
        if self.flip == "alternating":
            # Which half begins mirrored is drawn once; from then on each image turns over every epoch.
            flipped = self._integers(share._replace(epoch=0), counter_draws.FLIP, 2) ^ (share.epoch & 1)
        elif self.flip:
            flipped = self._integers(share, counter_draws.FLIP, 2)
        return top, left, flipped

    def draw_changes(self, share: Share, shape: Sequence[int]) -> dict[str, NDArray[Any]]:
        """The draws that `change` takes for each image of `shape` (height, width), samples first."""

        def within(stream: int, most: float, least: float | None = None) -> NDArray[np.float64]:
            low = -most if least is None else least
            drawn = counter_draws.uniform(self.seed, share.epoch, share.indices, stream)
            return low + (most - low) * drawn

        def factor(stream: int, most: float) -> NDArray[np.float64]:
            return within(stream, 1 + most, max(0.0, 1 - most)) if most else np.ones(len(share.indices))

        drawn: dict[str, NDArray[Any]] = {}
        height, width = shape
        if self.bends:
            drawn["bend"] = bends(
                np.radians(within(counter_draws.ROTATION, self.rotation_degrees)),
                factor(counter_draws.SCALING, self.scaling),
                within(counter_draws.SHIFT_Y, self.translation) * height,
                within(counter_draws.SHIFT_X, self.translation) * width,
                shape,
            )
        if self.colours:
            drawn["colour"] = colours(
                factor(counter_draws.BRIGHTNESS, self.brightness),
                factor(counter_draws.CONTRAST, self.contrast),
                factor(counter_draws.SATURATION, self.saturation),
            )
        if self.cutout:
            top, left = (
                self._integers(share, stream, size) - self.cutout // 2
                for stream, size in ((counter_draws.CUTOUT_Y, height), (counter_draws.CUTOUT_X, width))
            )
            drawn["cutout"] = np.stack([top, left], 1).astype(np.int32)
        return drawn

    def change(self, images: Tensor, drawn: dict[str, Tensor]) -> Tensor:
        """A copy of gathered images, (batch, height, width, channels) uint8, changed as `drawn` for each."""
        if self.bends:
            images = bend(images, drawn["bend"])
        if self.colours:
            images = recolour(images, drawn["colour"])
        if self.cutout:
            images = cut_out(images, drawn["cutout"], self.cutout, self.fill)
        return images

    def change_masks(self, masks: Tensor, drawn: dict[str, Tensor]) -> Tensor:
        """Masks (batch, height, width), changed like their images, by the nearest pixel."""
        assert self.mask_fill is not None
        if self.bends:
            # Zeros come from outside; labels are exact in float32 up to 2**24.
            planes, grid = masks[:, None].float() - self.mask_fill, _grid(drawn["bend"], masks.shape[1:3])
            bent = F.grid_sample(planes, grid, mode="nearest", align_corners=False)[:, 0]
            masks = (bent + self.mask_fill).to(masks.dtype)
        if self.cutout:
            fill = (self.mask_fill,)
            masks = cut_out(masks[..., None], drawn["cutout"], self.cutout, fill)[..., 0]
        return masks

    def change_batch(
        self, images: Tensor, masks: Tensor | None, share: Share
    ) -> tuple[Tensor, Tensor | None]:
        """`change` and `change_masks` with the draws for `share`; images may lie on a device."""
        if not self.changes:
            return images, masks
        height, width = images.shape[1:3]
        changes = self.draw_changes(share, (height, width))
        drawn = {name: torch.from_numpy(values) for name, values in changes.items()}
        if masks is not None:
            masks = self.change_masks(masks, drawn)
        if images.device.type != "cpu":
            moved = {name: values.to(images.device) for name, values in drawn.items()}
            return self.change(images, moved), masks
        changed, at_once = torch.empty_like(images), max(1, _CACHED_PIXELS // (height * width))
        for start in range(0, len(images), at_once):
            part = slice(start, start + at_once)
            changed[part] = self.change(images[part], {name: each[part] for name, each in drawn.items()})
        return changed, masks

    def _integers(self, share: Share, stream: int, high: int) -> Indices:
        return counter_draws.integers(self.seed, share.epoch, share.indices, stream, high)


def build_augment(wanted: Any, info: DataInfo, *, images: bool, task_name: str, normalize: bool) -> Augment:
    """The augmentation that the config asks for; with `normalize`, cutouts are zeros once normalised.

    Raises:
        ConfigError: C011 for data without images, changes that leave nothing of them, and targets that would
            have to move with them and cannot.
    """
    augment = Augment(**dict(wanted))
    if not augment:
        return augment
    if not images:
        what = f"only uint8 images are augmented, and task={task_name} has {info.kind} data here"
        raise ConfigError("C011", what, key="augment", suggestion="Use augment=none")
    sides = info.input_shape[1:] if info.input_shape else ()
    for name in ("cutout", "crop_padding"):
        most = min(sides, default=0) - (name == "crop_padding" and augment.reflects)
        if sides and (value := getattr(augment, name)) > most:
            what = f"hides whole images of {sides[1]}x{sides[0]}"
            hint = f"Use augment.{name}={max(1, min(sides) // 4)}, say"
            raise ConfigError("C011", what, key=f"augment.{name}", value=value, suggestion=hint)
    if augment.resized_crop is not None:
        height, width = (info.input_shape or (0, 0, 0))[1:]
        if height != width:
            what = f"boxes are scaled to squares, and images here are {width}x{height}"
            hint = f"Set data.image_size={min(height, width)}, or use augment.resized_crop=null"
            raise ConfigError("C011", what, key="augment.resized_crop", suggestion=hint)
        augment = augment.model_copy(update={"size": height})
    if normalize and (known := info.extra.get("normalize")):
        augment = augment.model_copy(update={"fill": tuple(round(value) for value in known["mean"])})
    if augment.targets == "keep":
        return augment
    hint = "Use augment=none, or augment.targets=keep if targets are not coordinates"
    if info.target_kind == "unknown" and (augment.moves or augment.bends):
        what = "targets that may be coordinates, such as boxes or points, do not move with the pixels"
        raise ConfigError("C011", what, key="augment", suggestion=hint)
    if info.target_kind == "map" and augment.hides:
        what = "pixels outside an image, or cut out of it, have no targets to learn"
        hint = "Use augment.crop_padding=0 augment.flip=true, say, or augment=resized_crop"
        raise ConfigError("C011", what, key="augment", suggestion=hint)
    if info.target_kind in ("mask", "map"):
        augment = augment.model_copy(update={"mask_fill": info.ignore_index})
    return augment


GREY = (19595, 38470, 7471)
"""Parts of red, green and blue in grey, in 1/65536: the weights of ITU-R 601, as PIL has them."""
_BITS = 16
_HALF = 1 << (_BITS - 1)

Figures = NDArray[np.float64]


def bends(
    angle: Figures, scale: Figures, shift_y: Figures, shift_x: Figures, shape: Sequence[int]
) -> NDArray[np.float32]:
    """Six coefficients for `bend` of each image: where its pixels come from.

    Images are scaled and turned around their centre, clockwise, by radians, then shifted by pixels.
    """
    height, width = shape
    cosine, sine = np.cos(angle) / scale, np.sin(angle) / scale
    x = np.stack([cosine, sine, -cosine * shift_x - sine * shift_y], 1) * (2 / width)
    y = np.stack([-sine, cosine, sine * shift_x - cosine * shift_y], 1) * (2 / height)
    return np.concatenate([x, y], 1).astype(np.float32)


def bend(images: Tensor, coefficients: Tensor) -> Tensor:
    """Images turned, scaled and shifted, each by its own amount, with bilinear weights; black outside.

    Cost: some 16 us for an image of 32x32 on one core.
    """
    planes = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    sampled = F.grid_sample(planes, _grid(coefficients, images.shape[1:3]), align_corners=False)
    bent = torch.empty_like(images)
    bent.permute(0, 3, 1, 2).copy_(sampled.round_())
    return bent


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
    from the grey of the pixel. Together they are one factor each for pixel, grey and mean grey.
    """
    of_pixel = brightness * contrast * saturation
    of_grey = brightness * contrast * (1 - saturation)
    of_mean = brightness * (1 - contrast)
    return np.rint(np.stack([of_pixel, of_grey, of_mean], 1) * (1 << _BITS)).astype(np.int32)


def grey_weights(channels: int) -> Sequence[int]:
    """Parts of the channels in grey, in 1/65536."""
    return GREY if channels == 3 else [(1 << _BITS) // channels] * channels


def recolour(images: Tensor, factors: Tensor) -> Tensor:
    """Images of other brightness, contrast and saturation; channels weigh alike in grey unless there are 3.

    Computed in integers and rounded only once: the same bits on every device, with any number of threads.

    Cost: some 15 us for an image of 32x32 on one core.
    """
    size, height, width, channels = images.shape
    # One plane for each channel: a factor then holds for long runs of memory.
    planes = images.permute(3, 0, 1, 2).to(torch.int32, memory_format=torch.contiguous_format)
    grey = torch.full_like(planes[0], _HALF)
    for plane, weight in zip(planes, grey_weights(channels), strict=True):
        grey.add_(plane, alpha=weight)
    grey >>= _BITS
    of_pixel, of_grey, of_mean = factors.view(size, 3, 1, 1).unbind(1)
    mean = (grey.sum((1, 2), keepdim=True) * of_mean).div_(height * width, rounding_mode="floor")
    offset = grey.mul_(of_grey).add_(mean.to(torch.int32)).add_(_HALF)
    planes.mul_(of_pixel).add_(offset)
    planes >>= _BITS
    return planes.clamp_(0, 255).to(torch.uint8).permute(1, 2, 3, 0).contiguous()


def cut_out(images: Tensor, corners: Tensor, side: int, fill: Sequence[float]) -> Tensor:
    """Images with a square hidden in each, as far as it lies inside.

    Its centre lies inside, top and left are in `corners` (batch, 2); `fill` is its colour, black if empty.

    Source: DeVries, Taylor 2017, arXiv:1708.04552.
    """
    size, height, width, channels = images.shape
    device = images.device
    steps = torch.arange(side, device=device)
    # Pixels outside are clamped to the border, which such a square hides anyway.
    y, x = (
        (corner[:, None] + steps).clamp_(0, most - 1)
        for corner, most in zip(corners.unbind(1), (height, width), strict=True)
    )
    # Filled on the device: a tensor made on the host would have to be copied there.
    shown = [torch.full((1,), value, dtype=images.dtype, device=device) for value in fill or [0] * channels]
    images = images.clone()
    images[torch.arange(size, device=device)[:, None, None], y[:, :, None], x[:, None]] = torch.cat(shown)
    return images
