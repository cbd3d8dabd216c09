"""Random changes to uint8 images, a whole batch at once, each image with draws of its own."""

from __future__ import annotations

from ptfast.data.transforms.augment.augment_plan import Augment, build_augment
from ptfast.data.transforms.augment.mask_moves import AugmentedMasks, moved, moved_by_crops
from ptfast.data.transforms.augment.row_windows import AugmentedImages, augmented, cropped

__all__ = [
    "Augment",
    "AugmentedImages",
    "AugmentedMasks",
    "augmented",
    "build_augment",
    "cropped",
    "moved",
    "moved_by_crops",
]
