"""The global generators of torch (CPU), numpy and random, which users' data sets draw from."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators inside, and put them back after."""
    before = _states()
    seed_all(seed)
    try:
        yield
    finally:
        _put(before)


class OwnGenerators:
    """States of the global generators that advance only while a block of `in_place` runs.

    What one stream draws then depends neither on what the training draws in between nor on where a run was
    resumed.
    """

    def __init__(self) -> None:
        self._own: Any = None

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Have these states in the global generators, and afterwards those from before."""
        before = _states()
        if self._own is not None:
            _put(self._own)
        try:
            yield
        finally:
            self._own = _states()
            _put(before)


def seed_all(seed: int) -> None:
    """Seed the global generators, for whatever draws next."""
    torch.default_generator.manual_seed(seed & 0x7FFF_FFFF_FFFF_FFFF)
    np.random.seed(seed & 0xFFFF_FFFF)
    random.seed(seed)


def _states() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _put(states: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
