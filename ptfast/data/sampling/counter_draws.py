"""Random draws as a function of (seed, epoch, index, stream), and the states of other generators."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ptfast.data.sampling import counter_draws

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FACTOR_1 = 0xBF58476D1CE4E5B9
FACTOR_2 = 0x94D049BB133111EB
ORDER, SPLIT, CROP_Y, CROP_X, FLIP, WINDOW, GLOBAL, MIX, BATCHES = range(9)
CUTOUT_Y, CUTOUT_X, BRIGHTNESS, CONTRAST, SATURATION, ROTATION, SCALING, SHIFT_Y, SHIFT_X = range(16, 25)
NEARBY, HUE, GRAYSCALE, BLUR, BLUR_SIGMA, ERASING, PARTS = range(25, 32)
"""Streams, one per purpose of a draw. Draws of different streams are independent."""
BOX = 64
"""Stream of a box's top; the next ones, up to 85, are for its left edge and the candidate sizes."""
ERASED, POLICY = 96, 128
"""The first streams of an erased box (numbered like `BOX`) and of a policy's operations."""


def finalize(bits: int) -> int:
    """Mix the low 64 bits of `bits`, so that each output bit depends on all: the finalizer of SplitMix64.

    Source: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, 2014.
    """
    z = bits & MASK
    z = (z ^ (z >> 30)) * FACTOR_1 & MASK
    z = (z ^ (z >> 27)) * FACTOR_2 & MASK
    return z ^ (z >> 31)


def bits(seed: int, epoch: int, indices: NDArray[np.integer], stream: int) -> NDArray[np.uint64]:
    """Draw 64 random bits for each index: uint64, in the shape of `indices`.

    Seeding a generator per sample takes microseconds. A hash of a counter (`finalize` for arrays) takes
    nanoseconds, has no state to save, and gives a sample the same draw in any batch, rank or worker.
    """
    z = np.asarray(indices).astype(np.uint64)
    z *= np.uint64(GOLDEN)
    z += np.uint64(key(seed, epoch, stream))
    z ^= z >> np.uint64(30)
    z *= np.uint64(FACTOR_1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(FACTOR_2)
    z ^= z >> np.uint64(31)
    return z


def integers(
    seed: int, epoch: int, indices: NDArray[np.integer], stream: int, high: int
) -> NDArray[np.int64]:
    """Draw integers in [0, high), one for each index; other arguments as for `bits`."""
    if not 0 < high <= 1 << 32:
        raise ValueError(f"high must lie in 1 to 2**32, not {high}")
    z = bits(seed, epoch, indices, stream) >> np.uint64(32)
    return ((z * np.uint64(high)) >> np.uint64(32)).astype(np.int64)


def uniform(seed: int, epoch: int, indices: NDArray[np.integer], stream: int) -> NDArray[np.float64]:
    """Draw floats in [0, 1) with 53 random bits, one for each index; arguments as for `bits`."""
    return (bits(seed, epoch, indices, stream) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def key(*parts: int) -> int:
    """Hash the parts, in order, into one 64-bit integer."""
    z = 0
    for part in parts:
        z = finalize((z + part + 1) * GOLDEN)
    return z


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators in this context, and restore their states afterwards."""
    before = _states()
    seed_all(seed)
    try:
        yield
    finally:
        _put(before)


class OwnGenerators:
    """A stream's own states of the global generators, separate from those of training."""

    _own: Any = None

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Continue these states in the global generators in this context, and restore those afterwards."""
        before = _states()
        if self._own is not None:
            _put(self._own)
        try:
            yield
        finally:
            self._own = _states()
            _put(before)


def seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed & 0x7FFF_FFFF_FFFF_FFFF)
    np.random.seed(seed & 0xFFFF_FFFF)
    random.seed(seed)


def _states() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _put(states: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


_DEPTH, _ITEMS = 4, 64
"""Search depth for generators (a dataset, its transforms, theirs), and the largest container searched."""
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)


class DatasetState:
    """Sets a dataset's epoch and seeds its generators, in each process that reads it.

    Sources of parts of one dataset share one instance.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._epoch = dataset, -1
        self._generators: list[Any] = []

    def begin(self, epoch: int) -> bool:
        """Set the dataset's epoch if it changed; return True if the dataset has generators."""
        if epoch != self._epoch:
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(epoch)
            # Some datasets create their generators at the first sample, or again in every epoch.
            self._epoch, self._generators = epoch, [found for _, found in generators_of(self._dataset)]
        return bool(self._generators)

    def seed(self, *parts: int) -> None:
        """Seed each of the dataset's generators differently, from the integers `parts`."""
        for number, generator in enumerate(self._generators):
            _seed(generator, counter_draws.key(*parts, counter_draws.GLOBAL, number))


def generators_of(value: Any, name: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield generators of numpy, torch and `random` in attributes and small containers, with their paths."""
    if isinstance(value, _GENERATORS):
        yield name, value
    elif depth and isinstance(value, (list, tuple, dict)):
        items = value.values() if isinstance(value, dict) else value
        for item in items if len(value) <= _ITEMS else ():
            yield from generators_of(item, name, depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType, torch.Tensor)):
        for attribute, item in vars(value).items():
            yield from generators_of(item, f"{name}.{attribute}" if name else attribute, depth - 1)


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        bits.state = type(bits)(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed & 0xFFFF_FFFF)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    else:
        generator.manual_seed(seed & 0x7FFF_FFFF_FFFF_FFFF)
