"""Order of the samples and random draws of a script, as functions of (seed, epoch, index) without state."""

from __future__ import annotations

import numpy as np

SEED = 0
VAL_SIZE = 0
GOLDEN, FACTOR_1, FACTOR_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
ORDER, SPLIT, CROP_Y, CROP_X, FLIP, WINDOW = range(6)


def finalise(bits: int) -> int:
    """Mix 64 bits well (SplitMix64)."""
    z = bits & (1 << 64) - 1
    z = (z ^ (z >> 30)) * FACTOR_1 & (1 << 64) - 1
    z = (z ^ (z >> 27)) * FACTOR_2 & (1 << 64) - 1
    return z ^ (z >> 31)


def random_bits(epoch: int, indices: np.ndarray, stream: int) -> np.ndarray:
    """64 random bits for each sample, the same in any batch; `stream` is what they are for."""
    key = 0
    for part in (SEED, epoch, stream):
        key = finalise((key + part + 1) * GOLDEN)
    z = indices.astype(np.uint64) * np.uint64(GOLDEN) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(FACTOR_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(FACTOR_2)
    return z ^ (z >> np.uint64(31))


def random_integers(epoch: int, indices: np.ndarray, stream: int, high: int) -> np.ndarray:
    """A random integer in [0, high) for each sample."""
    bits = random_bits(epoch, indices, stream) >> np.uint64(32)
    return (bits * np.uint64(high) >> np.uint64(32)).astype(np.int64)


def shuffled(epoch: int, size: int) -> np.ndarray:
    """The order of the samples in an epoch: random bits sorted, with the index in their low end."""
    index_bits = np.uint64(max(size - 1, 1).bit_length())
    indices = np.arange(size, dtype=np.uint64)
    keys = np.sort(random_bits(epoch, indices, ORDER) >> index_bits << index_bits | indices)
    return (keys & (np.uint64(1) << index_bits) - np.uint64(1)).astype(np.int64)


def split_indices(size: int) -> tuple[np.ndarray, np.ndarray]:
    """The samples to train on, and VAL_SIZE held out for validation, each in ascending order."""
    order = np.argsort(random_bits(0, np.arange(size), SPLIT), kind="stable")
    return np.sort(order[VAL_SIZE:]), np.sort(order[:VAL_SIZE])


def step_seed(step: int, micro_batch: int = 0) -> int:
    """Seed of a step's dropout and the like."""
    return finalise(SEED * GOLDEN + step * 0xD1B54A32D192ED03 + micro_batch * 0x8CB92BA72F3D8DD7)
