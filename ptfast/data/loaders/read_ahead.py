"""A thread that has the next batch ready while this one trains, for training on a CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from queue import Empty, Full, Queue

from ptfast.core.errors import ConfigError
from ptfast.core.protocols import StepBatch
from ptfast.data.map_source import BaseSource

_LOOK_S = 0.1
"""How often a thread that waits for room looks whether anybody still wants its batches."""
_CLOSE_S = 2.0
"""How long the thread may take to notice that nobody does; one that is stuck ends with the process."""


def read_ahead(batches: Iterator[StepBatch], depth: int = 1) -> Iterator[StepBatch]:
    """The same batches, of which a thread reads `depth` ahead.

    Decoding, gathering and normalising leave the interpreter to others for most of their time. The thread
    ends with the last batch, or when nobody wants more; what goes wrong in it is raised here, in its turn.
    """
    queue: Queue[tuple[StepBatch | None, BaseException | None]] = Queue(depth)
    unwanted = threading.Event()

    def put(item: tuple[StepBatch | None, BaseException | None]) -> bool:
        while not unwanted.is_set():
            try:
                queue.put(item, timeout=_LOOK_S)
            except Full:
                continue
            return True
        return False

    def read() -> None:
        error: BaseException | None = None
        try:
            for batch in batches:
                if not put((batch, None)):
                    return
        except BaseException as caught:
            error = caught
        put((None, error))

    thread = threading.Thread(target=read, name="ptfast-read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            batch, error = queue.get()
            if error is not None:
                raise error
            if batch is None:
                return
            yield batch
    finally:
        unwanted.set()
        late_s = time.monotonic() + _CLOSE_S
        while thread.is_alive() and time.monotonic() < late_s:
            try:
                queue.get(timeout=_LOOK_S)
            except Empty:
                continue


def check_read_ahead(source: BaseSource) -> None:
    """Raise ConfigError C011 for samples that draw from the global generators, as the training does."""
    if not (source.repeatable or source.in_memory):
        what = "samples may draw from the generators that the training draws from, and a thread shares them"
        hint = "Use dataloader=workers, whose generators are their own"
        raise ConfigError("C011", what, key="dataloader.read_ahead", value="true", suggestion=hint)
