"""The order of samples in an epoch, and how a batch is cut into micro-batches."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ptfast.data.sampling import counter_draws

Indices = NDArray[np.int64]


@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, size: int) -> Indices:
    """The order of `size` samples in `epoch`: int64, read-only.

    Sorting random bits with the index in their low end makes the order independent of the sorting algorithm
    and of numpy's generators, and is faster than an argsort (15 ms for a million samples).
    """
    index_bits = np.uint64(max(size - 1, 1).bit_length())
    indices = np.arange(size, dtype=np.uint64)
    keys = (
        counter_draws.bits(seed, epoch, indices, counter_draws.ORDER) >> index_bits << index_bits
    ) | indices
    keys.sort()
    keys &= (np.uint64(1) << index_bits) - np.uint64(1)
    order = keys.view(np.int64)
    order.flags.writeable = False
    return order


def micro_batch_bounds(num_samples: int, micro_batches: int) -> list[tuple[int, int]]:
    """Cut `num_samples` evenly into `micro_batches` runs (start, stop); some empty if there are too few."""
    cuts = [m * num_samples // micro_batches for m in range(micro_batches + 1)]
    return list(pairwise(cuts))
