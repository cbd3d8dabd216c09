"""Signals that end a run, after the step that it is in or out of its wait for data, with its state saved."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import count
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from ptfast.core.distributed import Ranks, all_come_to
from ptfast.core.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED

if TYPE_CHECKING:
    from ptfast.core.run import Run

T = TypeVar("T")

LATE_S = 5.0
"""How long several ranks keep waiting for data, so that all end after one step if it comes; then, how long
they wait for each other."""
REPEATED_S = 1.0
"""Signals within this time are one: a scheduler and a script between may both have sent it."""
LAST_S = 10.0
"""How long the process has to leave after a second signal."""


class Stopped(BaseException):
    """A signal has come while the run waited for data: raised out of the wait, whoever's code that is in."""


class Preempted(BaseException):
    """A signal has ended the run with nothing saved, as its message says."""


def interruptible(run: Run, batches: Iterator[T], *, together: bool = True) -> Iterator[T]:
    """The same batches; a signal that comes while one is awaited raises `Stopped`.

    Nothing has begun then of what the batch was for, so that the run can be saved as it stands. Several ranks
    wait for one another afterwards: they end the wait only if all are in it, at the same batch.

    Args:
        together: whether what is done with a batch takes all ranks.

    Raises:
        Stopped: a signal has come.
        Preempted: a signal has come, and other ranks are not in this wait.

    Cost: 0.3 us a batch.
    """
    several, asked = together and run.ranks.distributed, run.status.stop_signal
    waits = "together" if several else "alone"
    for number in count():
        run.status.waits = waits
        try:
            # One that came just before the wait was not raised out of it.
            if run.status.stop_signal != asked and not several:
                raise Stopped
            batch = next(batches, None)
        except Stopped:
            # From here on it stays ended, whatever else comes.
            run.status.waits, step = None, run.progress.step
            if several and not all_come_to(f"{step}/{number}", run.ranks, LATE_S):
                raise Preempted(f"stopped at step {step}, without saving: not all ranks wait there") from None
            raise
        finally:
            run.status.waits = None
        if batch is None:
            return
        yield batch


class Signals:
    """Lets SIGTERM, SIGUSR1, SIGHUP and Ctrl-C end the run after the step it is in, with its state saved.

    A run that waits for data is in no step: it ends at once. Before the run is built there is nothing to
    save: it ends at once, too. Several ranks first build it and keep waiting for data for `LATE_S`, so that
    none waits for one that has left.

    A second signal ends a run at once and unsaved, unless it is being saved. Several ranks are sent it by
    torchrun where they are late: there only Ctrl-C does.
    """

    def __init__(self, display: Any, ranks: Ranks) -> None:
        self.run: Run | None = None
        self.received: int | None = None
        self.closing = False
        """The outcome of the run is being written, and nothing else is left to do."""
        self._display, self._several, self._pid = display, ranks.distributed, os.getpid()
        self._first_s, self._leaves = 0.0, False

    @property
    def exit_code(self) -> int:
        """Of a run that a signal has ended."""
        return EXIT_INTERRUPTED if self.received == signal.SIGINT else EXIT_PREEMPTED

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A process that a data set has forked ends as it would have without a run around it.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        run, first, self.received = self.run, self.received is None, number
        if first:
            self._first_s = time.monotonic()
        if run is not None:
            run.status.stop_signal = number
        again = not self._several and time.monotonic() - self._first_s > REPEATED_S
        again = again and (run is None or run.clock.cause != "saving")
        if again and not self._leaves:
            self._leaves = True
            # Whatever is in the way: code that swallows every exception, a connection that hangs.
            self._later(LAST_S, self._leave)
        if number == signal.SIGINT and (run is None or not first):
            raise KeyboardInterrupt
        if self.closing:
            return
        if self._several and first:
            self._later(LATE_S, self._end_late)
        if not self._several or (run is not None and run.status.waits == "alone"):
            self._end_wait()
        if run is not None and first:
            # It may interrupt another line that is being written, which Python's streams refuse.
            with contextlib.suppress(RuntimeError):
                self._display.note("stopping after this step; the state is being saved")
        if run is not None and again:
            raise Preempted(f"{self._name} again at step {run.progress.step}, without saving")

    @property
    def _name(self) -> str:
        assert self.received is not None
        return signal.Signals(self.received).name

    def _end_wait(self) -> None:
        if self.run is None:
            raise Preempted(f"{self._name} before the first step")
        if self.run.status.waits:
            raise Stopped

    def _end_late(self) -> None:
        if not self.closing:
            self._later(LATE_S, self._end_late)
            self._end_wait()

    def _leave(self) -> None:
        os._exit(self.exit_code)

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        # A thread would be started under locks, which the code that a signal interrupts may hold.
        signal.signal(signal.SIGALRM, lambda number, frame: act())
        signal.setitimer(signal.ITIMER_REAL, seconds)


@contextlib.contextmanager
def caught_signals(display: Any, ranks: Ranks) -> Iterator[Signals]:
    """Have signals caught; SIGHUP stays ignored where it is, as under nohup."""
    caught = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        caught.append(signal.SIGHUP)
    handler = Signals(display, ranks)
    previous = {number: signal.getsignal(number) for number in (*caught, signal.SIGALRM)}
    for number in caught:
        signal.signal(number, handler)
    try:
        yield handler
    finally:
        if handler.received is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, before in previous.items():
            signal.signal(number, before)
