"""Images from shards that are downloaded on demand, in an order that depends only on seed and pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import torch
from torch.utils.data import IterableDataset

from ptfast.core.errors import DataError
from ptfast.core.sections.secret_values import hide_credentials
from ptfast.core.units import num_bytes
from ptfast.data.data_fingerprint import describe_part
from ptfast.data.decoding.image_decoding import InTar
from ptfast.data.sampling import counter_draws
from ptfast.data.sampling.sampler import MicroBatchIndices, permutation
from ptfast.data.sources.image_files import ImageFiles, OnCorrupt
from ptfast.data.streams.iterable import IterableSource
from ptfast.data.streams.shard_cache import ShardCache
from ptfast.data.streams.shard_index import Shard
from ptfast.data.transforms.augment_plan import Augment
from ptfast.data.transforms.row_windows import augmented, cropped

_AHEAD = 4
"""Maximum number of shards to prefetch; they fill at most half of the cache."""


class Sample(NamedTuple):
    """An image in a shard, which is read when its batch is made, and the shards to read next."""

    url: str
    shard: Shard
    place: int
    following: list[str]


class Shards(IterableDataset[Sample]):
    """The samples of shards; shards, and samples within each shard, come in random order."""

    shared_by = "none"

    def __init__(self, urls: list[str], cache: ShardCache, seed: int) -> None:
        self.urls, self.cache, self.seed = urls, cache, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        order = permutation(self.seed, self._epoch, len(self.urls)).tolist()
        for turn, number in enumerate(order):
            url, following = self.urls[number], [self.urls[n] for n in order[turn + 1 : turn + 1 + _AHEAD]]
            shard = self.cache.index(url)
            fitting = self.cache.bound // (2 * int(shard.sizes.sum()) + 1)
            seed = counter_draws.key(self.seed, counter_draws.NEARBY, number)
            places = permutation(seed, self._epoch, len(shard.offsets)).tolist()
            for place in places:
                yield Sample(url, shard, place, following[:fitting])


class ShardStream(IterableSource):
    """Images of the shards of `dataset`, read and decoded when their batch is made.

    `classes` are the class names, or the number of classes if labels are numbers.
    """

    images = shares_batches = True
    dataset: Shards

    def __init__(
        self, dataset: Shards, classes: int | Sequence[str], image_size: int | None, on_corrupt: OnCorrupt
    ) -> None:
        super().__init__(dataset, dataset.seed)
        numbered = isinstance(classes, int)
        self._classes = {name: i for i, name in enumerate(range(classes) if numbered else classes)}
        self._numbered, self.image_size = numbered, image_size
        self.on_corrupt: OnCorrupt = on_corrupt
        self.shape: tuple[int, ...] = ()
        """(height, width, channels) that every image must have; empty until known."""

    def contents(self) -> list[Any]:
        # Use names only: another server may have the same shards.
        names = [PurePosixPath(urlsplit(url).path).name for url in self.dataset.urls]
        return describe_part(len(names), "shards", *names)

    def first_image(self) -> torch.Tensor:
        return self.batch([self.first[0]], MicroBatchIndices(0, np.zeros(1, np.int64), 1), Augment())[0][0]

    def too_wide(self) -> str | None:
        """Return a warning if the samples in the shuffle buffer span more shards than fit into the cache."""
        shard, bound = self.first[0].shard, self.dataset.cache.bound
        spanned = (self.shuffle_buffer or 0) * int((shard.offsets + shard.sizes).max()) // len(shard.sizes)
        # On average, a sample stays in the buffer for one buffer length; some stay twice as long.
        if 2 * spanned <= bound:
            return None
        what = f"data.shuffle_buffer={self.shuffle_buffer:,} spans about {num_bytes(spanned)} of shards"
        return f"{what}, so shards are fetched again and again. Set data.cache={2 * spanned // 2**20 + 1}MiB"

    def batch(self, samples: list[Sample], micro_batch: MicroBatchIndices, augment: Augment) -> Any:
        cache, places = self.dataset.cache, np.arange(len(samples))
        with ExitStack() as opened:
            following = {sample.url: sample.following for sample in samples}
            tars = {url: opened.enter_context(cache.open(url)) for url in following}
            cache.prefetch(dict.fromkeys(url for urls in following.values() for url in urls))
            paths = [_named(sample, tars[sample.url]) for sample in samples]
            targets = torch.tensor([*map(self._class_of, samples)])
            files = ImageFiles(paths, targets, self.image_size, self.on_corrupt)
            files.shape = self.shape
            if augment.resized_crop is not None:
                return cropped(augment, files, micro_batch, places)
            raw = files.fetch(places)
        return augmented(augment, raw, micro_batch) if augment else raw

    def _class_of(self, sample: Sample) -> int:
        label = sample.shard.labels[sample.place].item()
        found = self._classes.get(label if self._numbered else str(label))
        if found is None:
            what = f"has the label {label}, which is none of the {len(self._classes):,} of data.classes"
            hint = "Correct data.classes: it is the number of classes, or the list of their names"
            raise DataError("D004", what, key=str(_named(sample)), suggestion=hint)
        return found


def _named(sample: Sample, file: Any = None) -> InTar:
    shard, place = sample.shard, sample.place
    name = shard.names[place].decode("utf-8", "replace")
    span = int(shard.offsets[place]), int(shard.sizes[place])
    return InTar(hide_credentials(sample.url), name, *span, file)
