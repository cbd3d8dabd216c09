"""Checks that several readers of a stream read the same, or each a part, by checksums of samples."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptfast.core.errors import DataError

CHECKED = 16
"""Batches, or micro-batches of each reader, from the start on that are looked at: 1 ms for 1.5 MB."""


class Digest:
    """A running checksum of samples."""

    def __init__(self) -> None:
        self._found, self._first, self._varied = 0, None, False

    def add(self, samples: Iterable[Any]) -> int:
        """The checksum with these samples; 0 as long as all are equal, which identifies nothing."""
        for sample in samples:
            one = sum_of(sample)
            self._first = one if self._first is None else self._first
            self._varied = self._varied or one != self._first
            self._found = zlib.crc32(one.to_bytes(4, "little"), self._found)
        return (self._found | 1 << 32) if self._varied else 0


def place(digests: Sequence[int], rank: int, num_ranks: int) -> list[int]:
    """A rank's `digests` in their place among those of others, for sums over the ranks to collect."""
    before, behind = len(digests) * rank, len(digests) * (num_ranks - rank - 1)
    return [*[0] * before, *digests, *[0] * behind]


def check_same(digests: Sequence[int], name: str, step: int) -> None:
    """Refuse a data set that is read as one stream by all ranks, and is another on some.

    Each rank would keep its share of a stream that the others have not: samples would be lost, and nobody
    would know.

    Args:
        digests: of the samples of a step, by rank.
        name: of the data set's class.

    Raises:
        DataError: D008.
    """
    if len(set(digests)) <= 1:
        return
    what = f"{name} yields different samples on each rank (in step {step + 1}), and does not say why"
    hint = 'Give it shared_by = "ranks" if it splits itself over ranks, else "readers" or "none"'
    raise DataError("D008", what, key="data", suggestion=hint)


def check_parted(digests: Sequence[int], name: str) -> None:
    """Refuse a data set that is said to share itself out over readers, all of whom read the same.

    Args:
        digests: of what each reader has read so far.
        name: of the data set's class.

    Raises:
        DataError: D008.
    """
    if len(digests) <= 1 or len(set(digests)) > 1 or not digests[0]:
        return
    what = (
        f"{name} yields the same to each of {len(digests)} readers: every sample would come that many times"
    )
    hint = 'Give it shared_by = "none", or have each reader take its share by get_worker_info()'
    raise DataError("D008", what, key="data", suggestion=hint)


def sum_of(value: Any) -> int:
    """A checksum of a sample: of arrays, text, numbers, and of what holds these."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if isinstance(value, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(value).data) if not value.dtype.hasobject else 0
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        found = 0
        for item in value:
            found = zlib.crc32(sum_of(item).to_bytes(4, "little"), found)
        return found
    return zlib.crc32(repr(value).encode()) if isinstance(value, (bytes, str, int, float, complex)) else 0
