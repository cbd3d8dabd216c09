"""Chooses the loader for `dataloader.kind=auto`, by the data's size, free memory and a few timed samples."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from ptfast.core.errors import ConfigError, MachineError
from ptfast.core.machine import available_memory, shared_memory, spare_cores
from ptfast.core.tensors.trees import tensors_in
from ptfast.core.units import num_bytes, short_time
from ptfast.data.dataset import Source
from ptfast.data.loaders.dataset_source import DatasetSource
from ptfast.data.loaders.device_loader import free_bytes
from ptfast.data.map_source import MapSource
from ptfast.data.streams.iterable import IterableSource

DECODED_ONCE = ("memory", "device")
"""Kinds that decode all data once."""
_TIMED_S = 0.2
_TIMED_SAMPLES = 64
HAND_OVER_S = 2e-3
"""Batches that are read faster than this do not need worker processes."""
_WORKER_BYTES = 256 * 2**20
"""Approximate memory of a worker process besides its batches."""


class Choice(NamedTuple):
    """How training samples are loaded."""

    kind: str
    """A `dataloader.kind` other than `auto`."""
    reason: str
    """The reason, in a few words for the panel."""
    workers: int
    """Processes of the kind `workers`; 0 for other kinds."""


class SampleCost(NamedTuple):
    """The time to fetch one sample, and its decoded size."""

    seconds: float
    num_bytes: int


def choose(
    train: Source,
    others: Iterable[Source] = (),
    *,
    kind: str,
    workers: int | str = "auto",
    micro_batch_size: int = 1,
    num_samples: int | None = None,
    prefetch: int = 2,
    before: str | None = None,
    augments: bool = False,
    crops: bool = False,
    device: torch.device | None = None,
    world_size: int = 1,
) -> Choice:
    """Choose the loader for `train`: the requested kind, or for `auto` the one expected to be fastest.

    Data in memory is gathered there, and a pack is read in place. Files that fit into a quarter of the memory
    are decoded once, unless the run ends before it has used each. Otherwise a few samples are timed: workers
    are used if reading a batch takes longer than sending it between processes, and cores are free.

    Args:
        others: splits that are kept in memory together with `train`.
        num_samples: samples drawn from `train` in the whole run; None if unknown.
        before: the reason for `kind` if an earlier part of the run chose it for `auto`.
        crops: whether boxes are cropped from the training images, which are then kept at their original size.

    Raises:
        ConfigError: C011 for a kind that does not support this data.
        MachineError: E005 if the data does not fit into memory.
    """
    if isinstance(train, IterableSource):
        return _of_stream(train, kind, workers, world_size, before)
    own_bytes = train.original_bytes if crops else train.decoded_bytes
    sizes = [own_bytes, *(source.decoded_bytes for source in others)]
    needed = None if None in sizes else sum(filter(None, sizes))
    too_large = kind in DECODED_ONCE and needed is not None and needed > available_memory()
    if before is not None and (too_large or (kind == "device" and crops)):
        kind, before = "auto", None
    if kind == "auto":
        choice = _quickest(train, needed, workers, micro_batch_size, num_samples, prefetch)
        moves = choice.kind == "memory" and augments and not crops and train.images
        size = train.decoded_bytes if moves and device is not None and device.type == "cuda" else None
        # Images to augment are kept on the GPU if it has room for them with their padding.
        if device is None or size is None or 2 * size > free_bytes(device) // 4:
            return choice
        return choice._replace(kind="device", reason=f"{num_bytes(size)}, room on the GPU")
    _check_kind(train, kind, crops)
    if needed is not None and too_large and train.storage != "memory":
        what = f"the data takes {num_bytes(needed)} of memory, and {num_bytes(available_memory())} are free"
        hint = "Use dataloader=workers, or pack the data: ptfast pack SRC DST"
        raise MachineError("E005", what, key="dataloader.kind", value=kind, suggestion=hint)
    count = 0
    if kind == "workers" and workers != "auto":
        count = int(workers)
    elif kind == "workers":
        # An explicit request for workers gets at least one.
        ahead_bytes = time_samples(train).num_bytes * micro_batch_size * prefetch
        count = max(1, count_workers(workers, ahead_bytes))
    return Choice(kind, before or "as the config says", count)


def _check_kind(train: MapSource, kind: str, crops: bool) -> None:
    """Raise C011 for a kind of loader that does not support this data."""
    if kind == "device" and crops:
        what, hint = "augment.resized_crop crops images before they go to the device", "Use dataloader=memory"
        raise ConfigError("C011", what, key="dataloader.kind", value=kind, suggestion=hint)
    theirs = [each for each in train.parts if isinstance(each, DatasetSource)] if kind in DECODED_ONCE else []
    if any(each.collate.is_own for each in theirs):
        what = "a collate function of your own makes batches only when they are needed"
        hint = "Use dataloader=auto"
        raise ConfigError("C011", what, key="dataloader.kind", value=kind, suggestion=hint)
    if any(hasattr(each.dataset, "set_epoch") for each in theirs):
        what = "samples in memory stay those of the first epoch, and the dataset has set_epoch"
        raise ConfigError("C011", what, key="dataloader.kind", value=kind, suggestion="Use dataloader=auto")
    if kind == "packed" and train.storage != "pack":
        what = "the data is not a pack"
        hint = "Make one with ptfast pack SRC DST and name that, or use dataloader=auto"
        raise ConfigError("C011", what, key="dataloader.kind", value=kind, suggestion=hint)


def _of_stream(
    train: IterableSource, kind: str, workers: int | str, world_size: int, before: str | None
) -> Choice:
    """Choose the loader of a stream; without sharding one worker is enough: each reads the whole stream."""
    if kind not in ("auto", "plain", "workers"):
        what, hint = "iterable data is read in order and cannot be kept in memory", "Use dataloader=auto"
        raise ConfigError("C011", what, key="dataloader.kind", value=kind, suggestion=hint)
    if kind == "plain":
        return Choice(kind, before or "as the config says", 0)
    shared = train.shared_by != "none" or train.shares_batches
    count = count_workers(workers)
    if workers == "auto":
        count = train.workers_at_most(count, world_size) if shared else min(count, 1)
        count = max(1, count) if kind == "workers" else count
    if kind == "workers":
        return Choice(kind, before or "as the config says", count)
    if shared and count:
        reason = "workers share the batches" if train.shares_batches else "the dataset shares itself out"
        return Choice("workers", reason, count)
    return Choice("plain", "iterable data is read in order", 0)


def count_workers(workers: int | str, ahead_bytes: int = 0) -> int:
    """Return the number of worker processes of this rank; for `auto`, its spare cores minus one.

    Each prefetches `ahead_bytes`; all use at most a quarter of the free memory, and half of the shared one.
    """
    if workers != "auto":
        return int(workers)
    by_memory = available_memory() // 4 // (_WORKER_BYTES + ahead_bytes)
    by_shared = shared_memory() // 2 // max(1, ahead_bytes)
    return max(0, min(spare_cores() - 1, by_memory, by_shared))


def time_samples(source: MapSource) -> SampleCost:
    """Measure the time and size of a sample, by a few dozen spread over the data."""
    places = source.spread(_TIMED_SAMPLES)
    first = source.fetch(places[:1])
    start, count = time.perf_counter(), 0
    for chunk in np.array_split(places, -(-len(places) // 8)):
        source.fetch(chunk)
        count += len(chunk)
        if time.perf_counter() - start > _TIMED_S:
            break
    seconds = (time.perf_counter() - start) / count
    return SampleCost(seconds, sum(tensor.nbytes for tensor in tensors_in(first)))


def _quickest(
    train: MapSource,
    needed: int | None,
    workers: int | str,
    micro_batch_size: int,
    num_samples: int | None,
    prefetch: int,
) -> Choice:
    if train.storage == "memory":
        return Choice("memory", "the data is in memory", 0)
    cost = time_samples(train)
    batch_s = cost.seconds * micro_batch_size
    if train.storage == "pack" and batch_s < HAND_OVER_S:
        return Choice("packed", f"read in place, {short_time(cost.seconds)} a sample", 0)
    enough = num_samples is None or num_samples >= len(train)
    if train.repeatable and needed is not None and needed <= available_memory() // 4 and enough:
        return Choice("memory", f"{num_bytes(needed)}, decoded once", 0)
    within = "packed" if train.storage == "pack" else "plain"
    if batch_s < HAND_OVER_S:
        return Choice(within, f"a batch is read in {short_time(batch_s)}", 0)
    count = count_workers(workers, cost.num_bytes * micro_batch_size * prefetch)
    if count:
        return Choice("workers", f"a batch is read in {short_time(batch_s)}", count)
    lacks = "cores or memory are not to spare" if workers == "auto" else "there are no workers"
    return Choice(within, f"a batch is read in {short_time(batch_s)}, and {lacks}", 0)
