"""Order of the samples and random draws of a script, as functions of (seed, epoch, index) without state."""

from __future__ import annotations

import numpy as np

from ptfast.data.sampling.counter_draws import GOLDEN, ORDER, SPLIT, bits, finalise

SEED = 0
VAL_SIZE = 0


def shuffled(epoch: int, size: int) -> np.ndarray:
    """The order of the samples in an epoch: random bits sorted, with the index in their low end."""
    index_bits = np.uint64(max(size - 1, 1).bit_length())
    indices = np.arange(size, dtype=np.uint64)
    keys = np.sort(bits(SEED, epoch, indices, ORDER) >> index_bits << index_bits | indices)
    return (keys & (np.uint64(1) << index_bits) - np.uint64(1)).astype(np.int64)


def split_indices(size: int) -> tuple[np.ndarray, np.ndarray]:
    """The samples to train on, and VAL_SIZE held out for validation, each in ascending order."""
    order = np.argsort(bits(SEED, 0, np.arange(size), SPLIT), kind="stable")
    return np.sort(order[VAL_SIZE:]), np.sort(order[:VAL_SIZE])


def step_seed(step: int, micro_batch: int = 0) -> int:
    """Seed of a step's dropout and the like."""
    return finalise(SEED * GOLDEN + step * 0xD1B54A32D192ED03 + micro_batch * 0x8CB92BA72F3D8DD7)
