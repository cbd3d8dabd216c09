"""Trials that may run out of memory, and memory that is held back since no two runs need the same."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ptfast.core.distributed import Ranks
from ptfast.core.errors import EXIT_BUG, EXIT_OK
from ptfast.core.machine import is_memory_error, memory_limit, peak_memory_bytes
from ptfast.launch.rank_main import leave
from ptfast.measure.trials.child_process import write_trial

SPARE = 0.05
"""Part of the memory that a run may take at most, which has to stay free."""


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


@contextmanager
def telling_of_no_room(folder: Path, ranks: Ranks, result: dict[str, Any]) -> Iterator[None]:
    """End this process, with word of the trial that `result` is of, where memory runs out inside.

    Nothing in it can be trusted any more.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_memory_error(error):
            raise
        write_trial(folder, {**result, "no_room": str(error).splitlines()[0][:200]})
        # The other ranks may wait in a collective for this one: their parent ends them.
        leave(EXIT_BUG if ranks.distributed else EXIT_OK)
