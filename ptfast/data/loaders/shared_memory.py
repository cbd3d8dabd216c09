"""Large arrays that the ranks of one machine share."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ptfast.core.distributed import Ranks, joined, on_all_ranks

T = TypeVar("T")
Bytes = NDArray[np.uint8]


class SharedArrays:
    """Allocates large arrays, which the ranks of a machine share where possible.

    The first rank of a machine fills anonymous memory that the others map. It is freed however the run ends,
    and takes no space in /dev/shm, which is small in containers. A rank that cannot map it has its own array.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        shares = ranks is not None and ranks.local_world_size > 1 and joined() and hasattr(os, "memfd_create")
        self._ranks = ranks if shares else None
        self.num_sharing = self._ranks.local_world_size if self._ranks is not None else 1
        """Number of processes of this machine that share arrays."""
        self.note = f"in memory once for {self.num_sharing} ranks" if shares else ""
        """Where the arrays are, for the panel."""

    def fill(self, shape: tuple[int, ...], fill: Callable[[Bytes], T]) -> tuple[Bytes, T]:
        """Return an array of `shape`, filled by `fill`, and the result of `fill`. Call it on all ranks."""
        array, ranks, size = None, self._ranks, math.prod(shape)
        if ranks is None:
            array = np.zeros(shape, np.uint8)
            return array, fill(array)
        given, place = None, None
        if ranks.local_rank == 0:
            file = os.memfd_create("ptfast")
            os.ftruncate(file, size)
            array = np.frombuffer(mmap.mmap(file, size), np.uint8).reshape(shape)
            given, place = fill(array), (os.getpid(), file)
        answers: list[Any] = on_all_ranks((given, place), ranks.world_size)
        given, (process, number) = answers[ranks.rank - ranks.local_rank]
        why = None
        if array is None:
            try:
                # Copy on write, because torch does not support read-only arrays.
                with open(f"/proc/{process}/fd/{number}", "rb") as file:  # noqa: PTH123 - must stay unresolved
                    mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
                array = np.frombuffer(mapped, np.uint8).reshape(shape)
            except OSError as error:
                why = error.strerror
        failures = list(filter(None, on_all_ranks(why, ranks.world_size)))
        if place is not None:
            os.close(place[1])
        if failures:
            self.note = f"in memory of each of {len(failures) + 1} ranks ({failures[0]})"
        if array is None:
            array = np.zeros(shape, np.uint8)
            given = fill(array)
        return array, given

    def agree(self, answer: bool) -> bool:
        return answer if self._ranks is None else all(on_all_ranks(answer, self._ranks.world_size))
