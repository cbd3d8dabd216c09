"""The augmentation of training images, and the random draws for each image."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ptfast.core.errors import ConfigError
from ptfast.core.protocols import DataInfo
from ptfast.data import transforms
from ptfast.data.sampling import counter_draws
from ptfast.data.sampling.sampler import Indices, MicroBatchIndices
from ptfast.data.transforms import image_operations as ops
from ptfast.data.transforms.policies import apply_in_turn, draw_policy
from ptfast.data.transforms.resized_crops import box_edges, draw_boxes

_CACHED_PIXELS = 1 << 17
"""Pixels that the host processes at a time, so that intermediate results stay in its caches."""


class Augment(transforms.AugmentSection):
    """Augmentations: flip, crop, affine, policy, color, hue, blur and erasing, in this order.

    A resized crop of the original image comes before all others. All draws are functions of (seed, epoch,
    index). Crop and flip are part of gathering a batch; `change` does the rest.
    """

    seed: int = 0
    size: int = 0
    """Side in pixels that a resized crop is scaled to."""
    fill: tuple[float, ...] = ()
    """The color of hidden pixels, by channel; black if not given."""
    mask_fill: int | None = None
    """The label of pixels from outside an image or hidden in it; None if targets do not change."""

    def __bool__(self) -> bool:
        return self.moves or bool(self.changes)

    @property
    def moves(self) -> bool:
        """True if images are cropped or mirrored."""
        return self.crop_padding > 0 or bool(self.flip) or self.resized_crop is not None

    @property
    def changes(self) -> set[str]:
        """Names of the changes made after a batch is gathered, as in `draw_changes`."""
        colors, hidden = max(*self.jitter.values(), self.grayscale), max(self.cutout, self.erasing)
        most = {"affine": max(self.rotation_degrees, self.translation, self.scaling), "policy": self.policy}
        most |= {"color": colors, "hue": self.hue, "blur": self.blur, "erased": hidden}
        return {name for name, value in most.items() if value}

    @property
    def hides(self) -> bool:
        """True if some pixels may be hidden or come from outside the image."""
        outside = self.crop_padding > 0 and not self.reflects
        return outside or bool(self.changes & {"affine", "policy", "erased"})

    @property
    def reflects(self) -> bool:
        return self.crop_padding > 0 and self.crop_padding_mode == "reflect"

    def draw(self, micro_batch: MicroBatchIndices) -> tuple[Indices, Indices, Indices]:
        """Draw (top, left, flipped) of each image: the corner of its crop after the flip and padding."""
        none = np.zeros(len(micro_batch.indices), np.int64)
        top = left = flipped = none
        if self.crop_padding:
            high = 2 * self.crop_padding + 1
            top = self._integers(micro_batch, counter_draws.CROP_Y, high)
            left = self._integers(micro_batch, counter_draws.CROP_X, high)
        if self.flip == "alternating":
            # Draw once which half starts mirrored; from then on, each image flips every epoch.
            drawn = self._integers(micro_batch._replace(epoch=0), counter_draws.FLIP, 2)
            flipped = drawn ^ (micro_batch.epoch & 1)
        elif self.flip:
            flipped = self._integers(micro_batch, counter_draws.FLIP, 2)
        return top, left, flipped

    def draw_changes(self, micro_batch: MicroBatchIndices, shape: Sequence[int]) -> dict[str, NDArray[Any]]:
        """Draw the amounts of `change` for each image of `shape` (height, width), samples first."""

        draw = partial(counter_draws.uniform, self.seed, micro_batch.epoch, micro_batch.indices)

        def within(stream: int, most: float, least: float | None = None) -> NDArray[np.float64]:
            low = -most if least is None else least
            return low + (most - low) * draw(stream)

        def factor(stream: int, most: float) -> NDArray[np.float64]:
            return within(stream, 1 + most, max(0.0, 1 - most)) if most else np.ones(len(micro_batch.indices))

        drawn: dict[str, NDArray[Any]] = {}
        height, width = shape
        if "affine" in self.changes:
            angle = np.radians(within(counter_draws.ROTATION, self.rotation_degrees))
            scale = factor(counter_draws.SCALING, self.scaling)
            down = within(counter_draws.SHIFT_Y, self.translation) * height
            across = within(counter_draws.SHIFT_X, self.translation) * width
            drawn["affine"] = ops.affine_coefficients(angle, scale, down, across, shape)
        if self.policy:
            drawn["policy"] = draw_policy(self, draw, shape)
        if "color" in self.changes:
            streams = (counter_draws.BRIGHTNESS, counter_draws.CONTRAST, counter_draws.SATURATION)
            factors = [*map(factor, streams, self.jitter.values())]
            factors[2] *= draw(counter_draws.GRAYSCALE) >= self.grayscale
            drawn["color"] = ops.color_factors(*factors)
        if self.hue:
            drawn["hue"] = within(counter_draws.HUE, self.hue).astype(np.float32)
        if self.blur:
            # As in SimCLR; a thousandth of a pixel changes nothing.
            sigma = within(counter_draws.BLUR_SIGMA, 2.0, 0.1)
            sigma[draw(counter_draws.BLUR) >= self.blur] = 1e-3
            profiles = np.exp(-0.5 * (np.arange(max(shape)) / sigma[:, None]) ** 2)
            drawn["blur"] = np.rint(profiles * ops.BLUR_STEPS).astype(np.float32)
        if self.cutout:
            top = self._integers(micro_batch, counter_draws.CUTOUT_Y, height) - self.cutout // 2
            left = self._integers(micro_batch, counter_draws.CUTOUT_X, width) - self.cutout // 2
            drawn["erased"] = np.stack([top, top + self.cutout, left, left + self.cutout], 1).astype(np.int32)
        elif self.erasing:
            # As in torchvision, whose ratio is height / width here.
            heights, widths = (np.full(len(micro_batch.indices), size) for size in shape)
            how = heights, widths, (0.02, 0.33), (1 / 3.3, 1 / 0.3), counter_draws.ERASED
            boxes = draw_boxes(self.seed, micro_batch.epoch, micro_batch.indices, *how)
            chosen = draw(counter_draws.ERASING) < self.erasing
            drawn["erased"] = (box_edges(boxes, *shape) * chosen).T.astype(np.int32)
        return drawn

    def change(self, images: Tensor, drawn: dict[str, Tensor]) -> Tensor:
        """Return gathered images, (batch, height, width, channels) uint8, each changed as `drawn`."""
        operations = {"affine": ops.affine, "policy": apply_in_turn, "color": ops.recolor}
        operations |= {"hue": ops.shift_hue, "blur": ops.blur, "erased": partial(ops.erase, fill=self.fill)}
        for name, amounts in drawn.items():
            images = operations[name](images, amounts)
        return images

    def change_masks(self, masks: Tensor, drawn: dict[str, Tensor]) -> Tensor:
        """Move and erase masks (batch, height, width) like their images, by the nearest pixel."""
        assert self.mask_fill is not None
        fill, masks = self.mask_fill, masks[..., None]
        if "affine" in drawn:
            masks = ops.affine(masks, drawn["affine"], "nearest", fill)
        if "policy" in drawn:
            masks = apply_in_turn(masks, drawn["policy"], fill=fill)
        if "erased" in drawn:
            masks = ops.erase(masks, drawn["erased"], (fill,))
        return masks[..., 0]

    def change_batch(
        self, images: Tensor, masks: Tensor | None, micro_batch: MicroBatchIndices
    ) -> tuple[Tensor, Tensor | None]:
        """Apply `change` and `change_masks` with the draws for `micro_batch`."""
        if not self.changes:
            return images, masks
        shape = images.shape[1:3]
        drawn = {name: torch.from_numpy(each) for name, each in self.draw_changes(micro_batch, shape).items()}
        if masks is not None:
            masks = self.change_masks(masks, drawn)
        changed, at_once = torch.empty_like(images), max(1, _CACHED_PIXELS // shape.numel())
        for start in range(0, len(images), at_once):
            part = slice(start, start + at_once)
            changed[part] = self.change(images[part], {name: each[part] for name, each in drawn.items()})
        return changed, masks

    def _integers(self, micro_batch: MicroBatchIndices, stream: int, high: int) -> Indices:
        return counter_draws.integers(self.seed, micro_batch.epoch, micro_batch.indices, stream, high)


def build_augment(wanted: Any, info: DataInfo, *, images: bool, task_name: str, normalize: bool) -> Augment:
    """Build the configured augmentation; with `normalize`, hidden boxes are zeros once normalized.

    Raises:
        ConfigError: C011 for data without images, changes that hide whole images, and targets that cannot
            move with their images.
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
    if info.target_kind == "unknown" and (augment.moves or augment.changes & {"affine", "policy"}):
        what = "targets that may be coordinates, such as boxes or points, do not move with the pixels"
        raise ConfigError("C011", what, key="augment", suggestion=hint)
    if info.target_kind == "map" and augment.hides:
        what = "pixels outside an image, or hidden in it, have no targets to learn"
        hint = "Use augment.crop_padding=0 augment.flip=true, say, or augment=resized_crop"
        raise ConfigError("C011", what, key="augment", suggestion=hint)
    if info.target_kind in ("mask", "map"):
        augment = augment.model_copy(update={"mask_fill": info.ignore_index})
    return augment
