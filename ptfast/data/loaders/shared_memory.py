"""Large arrays that the ranks of one machine hold once, together."""

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


class Holder:
    """Where large arrays are held: by this process, for itself."""

    num_holders = 1
    """Processes of this machine that hold them together."""
    note = ""
    """How they are held, for the panel."""

    def fill(self, shape: tuple[int, ...], fill: Callable[[Bytes], T]) -> tuple[Bytes, T]:
        """An array of `shape` that `fill` has filled, and what that gave. To be called on all ranks."""
        array = np.zeros(shape, np.uint8)
        return array, fill(array)

    def agree(self, answer: bool) -> bool:
        """Return True if all ranks say yes."""
        return answer


class SharedHolder(Holder):
    """Where the ranks of a machine hold arrays together: the first of them fills memory that all map.

    The memory has no name, so that nothing is left of it however the run ends, and no share in /dev/shm, of
    which a container may have little. Where a rank cannot map it, that rank fills an array of its own.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self.num_holders = ranks, ranks.num_local_ranks
        self.note = f"held once for {self.num_holders} ranks"

    def fill(self, shape: tuple[int, ...], fill: Callable[[Bytes], T]) -> tuple[Bytes, T]:
        ranks, size = self._ranks, math.prod(shape)
        array, given, place = None, None, None
        if ranks.local_rank == 0:
            file = os.memfd_create("ptfast")
            os.ftruncate(file, size)
            array = np.frombuffer(mmap.mmap(file, size), np.uint8).reshape(shape)
            given, place = fill(array), (os.getpid(), file)
        answers: list[Any] = on_all_ranks((given, place), ranks.num_ranks)
        given, (process, number) = answers[ranks.rank - ranks.local_rank]
        why = None
        if array is None:
            try:
                array = _map(f"/proc/{process}/fd/{number}", size).reshape(shape)
            except OSError as error:
                why = error.strerror
        failures = list(filter(None, on_all_ranks(why, ranks.num_ranks)))
        if place is not None:
            os.close(place[1])
        if failures:
            self.note = f"held by each of {len(failures) + 1} ranks ({failures[0]})"
        return (array, given) if array is not None else super().fill(shape, fill)

    def agree(self, answer: bool) -> bool:
        return all(on_all_ranks(answer, self._ranks.num_ranks))


def build_holder(ranks: Ranks) -> Holder:
    """Where `ranks` hold large arrays: together with others of their machine, if there are any."""
    shares = ranks.num_local_ranks > 1 and joined() and hasattr(os, "memfd_create")
    return SharedHolder(ranks) if shares else Holder()


def _map(path: str, size: int) -> Bytes:
    # Writable to this process alone, since torch knows no other arrays.
    with open(path, "rb") as file:  # noqa: PTH123 - no path that resolving would leave as it is
        return np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY), np.uint8)
