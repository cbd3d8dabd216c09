"""The state of a user's dataset between reads: the epoch it was told, and random generators of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch

from ptfast.data.sampling import counter_draws

_DEPTH, _ITEMS = 4, 64
"""How deep generators are looked for, in containers of so many items: a dataset, its transforms, theirs."""
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)


class DatasetState:
    """Brings a dataset into the state of an epoch and of a sample, in whichever process reads it.

    Sources of parts of one dataset share it.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._epoch = dataset, -1
        self._generators: list[Any] = []

    def begin(self, epoch: int) -> bool:
        """Tell the dataset its epoch if that is another one; return True if it has generators."""
        if epoch != self._epoch:
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(epoch)
            # Some make their generators at the first sample, or anew in every epoch.
            self._epoch, self._generators = epoch, [found for _, found in generators_of(self._dataset)]
        return bool(self._generators)

    def seed(self, *parts: int) -> None:
        """Seed the dataset's own generators by the integers `parts`, each with a seed of its own."""
        for number, generator in enumerate(self._generators):
            _seed(generator, counter_draws.key(*parts, counter_draws.GLOBAL, number))


def generators_of(value: Any, name: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """The generators of numpy, torch and `random` in attributes and small containers, by their paths."""
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
