"""Fetching the raw batch of a share: from the source and augmented, the same bits whoever does it."""

from __future__ import annotations

from typing import Any

from ptfast.data.augment import Augment, AugmentedImages, augmented, cropped
from ptfast.data.sampler import Share
from ptfast.data.source import Source, TensorSource, as_tensor


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


class MemoryBatches:
    """Gathers augmented batches straight out of padded images in memory."""

    def __init__(self, source: TensorSource, augment: Augment, seed: int) -> None:
        self._images = AugmentedImages(source.inputs, augment, seed)
        self._targets = source.targets

    def __call__(self, share: Share) -> Any:
        return self._images.gather(share), self._targets.index_select(0, as_tensor(share.indices))
