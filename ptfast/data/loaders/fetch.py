"""Fetching the raw batch of a share: from the source and augmented, the same bits whoever does it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptfast.core.errors import ConfigError
from ptfast.data.loaders.shared_memory import Holder
from ptfast.data.map_source import MapSource, TensorSource, as_tensor
from ptfast.data.sampling.sampler import Share
from ptfast.data.transforms.augment.augment_plan import Augment
from ptfast.data.transforms.augment.mask_moves import AugmentedMasks, moved, moved_by_crops
from ptfast.data.transforms.augment.row_windows import AugmentedImages, augmented, cropped


class RawBatches:
    """Fetches from the source and augments the batch; sent to worker processes as it is."""

    def __init__(self, source: MapSource, augment: Augment, seed: int) -> None:
        self.source, self.augment, self.seed = source, augment, seed

    def __call__(self, share: Share) -> Any:
        if self.augment.resized_crop is not None:
            return self._cropped(share)
        raw = self.source.fetch(share.indices, share.epoch)
        return _augmented(self.augment, raw, self.seed, share) if self.augment else raw

    def _cropped(self, share: Share) -> Any:
        source, places = self.source, share.indices
        if not source.cuts:
            source = TensorSource(*source.fetch(places, share.epoch), images=True)
            places = np.arange(len(places))
        images = cropped(self.augment, source, self.seed, share, places)
        targets, sizes = source.labels(places), source.sizes(places)
        return images, moved_by_crops(self.augment, targets, sizes, self.seed, share)


class AugmentedStream:
    """Augments batches of a stream, whose samples are known by their numbers.

    Raises:
        ConfigError: C011 for crops that would be cut before images have come to one size.
    """

    def __init__(self, augment: Augment, seed: int) -> None:
        if augment.resized_crop is not None:
            what = "images of a stream are resized before anything can be cut out of them"
            hint = "Let the data set cut them, or use augment=crop_flip"
            raise ConfigError("C011", what, key="augment.resized_crop", suggestion=hint)
        self._augment, self._seed = augment, seed

    def __call__(self, raw: Any, epoch: int, numbers: list[int]) -> Any:
        share = Share(epoch, np.array(numbers), len(numbers))
        return _augmented(self._augment, raw, self._seed, share)


class MemoryBatches:
    """Gathers augmented batches straight out of padded images in memory."""

    def __init__(
        self, source: TensorSource, augment: Augment, seed: int, holder: Holder | None = None
    ) -> None:
        self._images = AugmentedImages(source.inputs, augment, seed, holder)
        self._targets = source.targets
        masks = augment.mask_fill is not None
        self._masks = AugmentedMasks(source.targets, augment, seed, holder) if masks else None

    @staticmethod
    def nbytes(source: TensorSource, augment: Augment) -> int:
        """Bytes that the padded copies take."""
        masks = AugmentedMasks.nbytes(source.targets, augment) if augment.mask_fill is not None else 0
        return AugmentedImages.nbytes(source.inputs, augment) + masks

    def __call__(self, share: Share) -> Any:
        images = self._images.gather(share)
        if self._masks is not None:
            return images, self._masks.gather(share)
        return images, self._targets.index_select(0, as_tensor(share.indices))


def _augmented(augment: Augment, raw: Any, seed: int, share: Share) -> Any:
    images = augmented(augment, raw[0], seed, share)
    return images, moved(augment, raw[1], seed, share), *raw[2:]
