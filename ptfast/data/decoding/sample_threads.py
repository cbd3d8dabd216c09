"""The same thing done for every sample of a batch, side by side where it leaves the interpreter to others."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def in_threads(count: int, work: Callable[[int], Result]) -> list[Result]:
    """`work(0)` to `work(count - 1)`, by as many threads as torch has here.

    Decoding and resizing run outside of the interpreter, so that threads of one process do them side by side.

    Raises:
        Exception: what `work` raised for the first place of those at which it did.
    """
    results: list[Any] = [None] * count
    errors: dict[int, Exception] = {}
    threads = min(torch.get_num_threads(), count)

    def work_some(start: int) -> None:
        for place in range(start, count, threads):
            try:
                results[place] = work(place)
            except Exception as error:
                errors[place] = error
                return

    if threads > 1:
        # Threads that outlived this call would not survive the fork of a worker process.
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work_some, range(threads)))
    elif threads:
        work_some(0)
    if errors:
        raise errors[min(errors)]
    return results
