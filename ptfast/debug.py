"""Debugging aids that slow training down and are off unless asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from ptfast.errors import NumericsError


@contextmanager
def debugging(mode: Literal["none", "anomaly"]) -> Iterator[None]:
    """Train inside this to have the checks of `mode`.

    `anomaly` stops at the first backward function that yields NaN and names it; the traceback of the forward
    call that made it goes to standard error. Cost: several times slower.

    Raises:
        NumericsError: N001 where a backward function yields NaN.
    """
    if mode == "none":
        yield
        return
    try:
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            yield
    except RuntimeError as error:
        if "returned nan values" not in str(error):
            raise
        raise NumericsError("N001", f"backward pass: {error}") from error
