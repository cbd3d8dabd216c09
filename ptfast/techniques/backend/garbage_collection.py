"""Python's garbage collector, which can wait until a segment of steps ends."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ptfast.core.clock import Clock


class Collector:
    """Python's garbage collector, which runs as usual, or only between segments of steps if it `waits`.

    Most objects that exist after the warm-up last as long as the run. They are frozen, so that collections
    skip them. If the collector is already off, it stays off; objects that are already frozen stay frozen.
    """

    def __init__(self, waits: bool) -> None:
        self.waits, self._collected_s = waits, 0.0
        self._freezes: bool | None = None
        """Whether this run has frozen objects; None before the first segment."""

    @contextmanager
    def waiting(self, clock: Clock) -> Iterator[None]:
        """Disable collections inside this context; collect at its end, but at most once per second."""
        if not self.waits or not gc.isenabled():
            yield
            return
        if self._freezes is None:
            clock.to("logging")
            # Checked only once: Python counts the frozen objects one by one.
            self._freezes = not gc.get_freeze_count()
            if self._freezes:
                gc.collect()
                gc.freeze()
        gc.disable()
        try:
            yield
        finally:
            if time.perf_counter() - self._collected_s > 1:
                clock.to("logging")
                gc.collect()
                self._collected_s = time.perf_counter()
            gc.enable()

    def release(self) -> None:
        """Unfreeze the objects, at the end of a run."""
        if self._freezes:
            gc.unfreeze()
            self._freezes = None
