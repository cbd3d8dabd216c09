"""Fetching the raw batch of a share: from the source and augmented, the same bits whoever does it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptfast.data.augment import Augment, AugmentedImages, augmented, cropped
from ptfast.data.sampler import Share
from ptfast.data.sharing import Holder
from ptfast.data.source import Source, TensorSource, as_tensor
from ptfast.errors import ConfigError


class RawBatches:
    """Fetches from the source and augments the batch; sent to worker processes as it is."""

    def __init__(self, source: Source, augment: Augment, seed: int) -> None:
        self.source, self.augment, self.seed = source, augment, seed

    def __call__(self, share: Share) -> Any:
        if self.augment.resized_crop is not None:
            return cropped(self.augment, self.source, self.seed, share), self.source.labels(share.indices)
        raw = self.source.fetch(share.indices, share.epoch)
        if self.augment:
            return (augmented(self.augment, raw[0], self.seed, share), *raw[1:])
        return raw


class AugmentedStream:
    """Augments batches of a stream, whose samples are known by their numbers.

    Raises:
        ConfigError: C011 for crops that would be cut before images have come to one size.
    """

    def __init__(self, augment: Augment, seed: int) -> None:
        if augment.resized_crop is not None:
            what = "images of a stream have come to one size before anything could be cut out of them"
            hint = "Let the data set cut them, or use augment=crop_flip"
            raise ConfigError("C011", what, key="augment.resized_crop", suggestion=hint)
        self._augment, self._seed = augment, seed

    def __call__(self, raw: Any, epoch: int, numbers: list[int]) -> Any:
        share = Share(epoch, np.array(numbers), len(numbers))
        return (augmented(self._augment, raw[0], self._seed, share), *raw[1:])


class MemoryBatches:
    """Gathers augmented batches straight out of padded images in memory."""

    def __init__(
        self, source: TensorSource, augment: Augment, seed: int, holder: Holder | None = None
    ) -> None:
        self._images = AugmentedImages(source.inputs, augment, seed, holder)
        self._targets = source.targets

    def __call__(self, share: Share) -> Any:
        return self._images.gather(share), self._targets.index_select(0, as_tensor(share.indices))
