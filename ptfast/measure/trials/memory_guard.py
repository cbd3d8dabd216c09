"""Memory that is held back from a measurement, since no two runs need the same."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ptfast.core.machine import memory_limit, peak_memory_bytes

SPARE = 0.05
"""Part of the memory that a run may take at most, which has to stay free."""
LESS_MEMORY = "Try precision=amp, checkpointing=full, gradients.accumulate=2 or a smaller model"
"""The suggestion where not even the smallest batch fits."""


@contextmanager
def memory_to_spare(device: torch.device) -> Iterator[None]:
    """Have what is done inside get by with a little less memory than there is.

    Held is what counts against the limit there is: memory of the GPU, or addresses of this process where
    `ulimit` limits those. Pages of a machine or a container count when they are written, so that there the
    most that was taken is looked at afterwards.

    Raises:
        MemoryError: where nothing limits the process and it has taken nearly all that was free.
    """
    limit, name = memory_limit(device.type)
    spare = int(SPARE * limit)
    before = peak_memory_bytes("cpu")
    held: object = None
    if device.type == "cuda":
        held = torch.empty(spare, dtype=torch.uint8, device=device)
    elif name.startswith("ulimit") and sys.platform != "win32":
        held = mmap.mmap(-1, spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    yield
    if held is None and peak_memory_bytes("cpu") - before > limit - spare:
        raise MemoryError(f"out of memory but for the last {SPARE:.0%}")
    del held
