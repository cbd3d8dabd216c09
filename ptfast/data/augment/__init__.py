"""Random changes to uint8 images, a whole batch at once, each image with draws of its own."""

from __future__ import annotations

from ptfast.data.augment.plan import Augment, build_augment
from ptfast.data.augment.windows import AugmentedImages, augmented, cropped

__all__ = ["Augment", "AugmentedImages", "augmented", "build_augment", "cropped"]
