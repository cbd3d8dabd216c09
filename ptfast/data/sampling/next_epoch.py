"""What the host computes for an epoch, prepared by a thread while the epoch before it trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Generic, TypeVar

T = TypeVar("T")


class NextEpoch(Generic[T]):
    """A pure function of a number, such as an epoch's, of which a thread computes the value that comes next.

    The two newest values are kept. The thread ends with its value, and `close` waits for it. An error in it
    is raised by the call that needs the value, which computes it once more.
    """

    def __init__(self, compute: Callable[[int], T]) -> None:
        self._compute = lru_cache(maxsize=2)(compute)
        self._thread: threading.Thread | None = None
        self._begun: int | None = None

    def __call__(self, number: int) -> T:
        if self._thread is not None and number == self._begun:
            self.close()
        return self._compute(number)

    def begin(self, number: int) -> None:
        """Start to compute the value of `number`; a second time, nothing happens."""
        if number != self._begun:
            self.close()
            self._begun, name = number, "ptfast-next-epoch"
            self._thread = threading.Thread(target=self._try, args=(number,), name=name, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait for the thread, if there is one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _try(self, number: int) -> None:
        with suppress(Exception):
            self._compute(number)
