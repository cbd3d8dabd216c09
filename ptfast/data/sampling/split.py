"""Holding out validation samples: the same ones for the same data, size and seed."""

from __future__ import annotations

import numpy as np

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, DataError
from ptfast.data.sampling import counter_draws
from ptfast.data.sampling.order import Indices


def held_out(size: int, val: Duration) -> int:
    """How many of `size` samples `data.val` holds out.

    Raises:
        ConfigError: C005 for a unit that says nothing about samples.
        DataError: D006 if nothing is left to train on.
    """
    if val.value == 0:
        return 0
    if val.unit == "percent":
        count = max(1, round(size * val.value / 100))
    elif val.unit == "samples":
        count = int(val.value)
    else:
        hint = "Use a share such as 10%, a number of samples such as 500samples, or 0"
        raise ConfigError("C005", "not an amount of samples", key="data.val", value=val, suggestion=hint)
    if count >= size:
        what = f"holds out {count:,} of {size:,} training samples, which leaves none to train on"
        hint = "Hold out less, or use data.val=0 for none"
        raise DataError("D006", what, key="data.val", value=val, suggestion=hint)
    return count


def split_indices(size: int, val: Duration, seed: int) -> tuple[Indices, Indices]:
    """Indices (train, val), each ascending; val is empty for `data.val=0`."""
    count = held_out(size, val)
    order = np.argsort(counter_draws.bits(seed, 0, np.arange(size), counter_draws.SPLIT), kind="stable")
    return np.sort(order[count:]), np.sort(order[:count])
