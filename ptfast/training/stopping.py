"""Handle signals: save a checkpoint and stop after the current step, or while waiting for data."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ptfast.core.distributed import Ranks, abort_process_group, all_come_to
from ptfast.core.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, user_place
from ptfast.core.machine import on_main_thread
from ptfast.core.protocols import takes_own_steps
from ptfast.report.terminal.display import drop_unread
from ptfast.training.hangs.deadlines import (
    HUNG_S,
    HUNG_TOGETHER_S,
    LAST_S,
    LATE_S,
    REPEATED_S,
    SAVING_S,
    SLOW_DISK_BYTES_PER_S,
    UNHANDLED_S,
)
from ptfast.training.hangs.hang_supervisor import DUMP

if TYPE_CHECKING:
    from ptfast.run import Run

T = TypeVar("T")

CAUGHT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
MOST_SWALLOWED = 3
"""Maximum number of times user code may swallow the exception that ends the run."""


class Preempted(BaseException):
    """A signal ended the run without saving; the message says where."""


class Stopped(Preempted):
    """A signal arrived while the run waits for data or hangs; raised in the running code."""


def interruptible(run: Run, batches: Iterator[T], *, together: bool = True) -> Iterator[T]:
    """Yield the same batches; a signal during the wait for one raises `Stopped`.

    That batch has not been used yet, so the run can be saved as it is. If several ranks use a batch
    `together`, they end the wait only if all of them wait for the same batch. Cost: 0.4 us per batch.
    """
    several, asked = together and run.ranks.distributed, run.stop_signal
    waits = "together" if several else "alone"
    for number in count():
        run.waits = waits
        try:
            # A signal just before the wait could not end it.
            if run.stop_signal != asked and not several:
                raise Stopped
            batch = next(batches, None)
        except Stopped:
            # The wait stays ended, whatever signals follow.
            run.waits, step = None, run.progress.step
            if several and not all_come_to(f"{step}/{number}", run.ranks, LATE_S):
                raise Preempted(f"stopped at step {step}, without saving: not all ranks wait there") from None
            raise
        finally:
            run.waits = None
        run.num_batches += 1
        if batch is None:
            return
        yield batch


class Signals:
    """Lets SIGTERM, SIGUSR1, SIGHUP and Ctrl-C end the run after the current step, with a checkpoint saved.

    A run that waits for data, or is not built yet, ends at once; several ranks first finish building and keep
    waiting for `LATE_S`. If a step, evaluation or callback hangs, the run ends with a checkpoint of the last
    whole step, or unsaved if several ranks, an optimizer or a task that takes its own steps hang.

    A second signal ends a run at once and unsaved, unless it is being saved. With several ranks only Ctrl-C
    does so, because torchrun sends late ranks a second signal.
    """

    def __init__(self, display: Any, ranks: Ranks) -> None:
        self.run: Run | None = None
        self.received: int | None = None
        self.closing = False
        """Whether only the outcome of the run remains to be written."""
        self._display, self._several, self._pid = display, ranks.distributed, os.getpid()
        self._first_s, self._leaves, self._aborted, self.place = 0.0, False, False, ""
        self._heard_s = self._moved_s = 0.0
        self._last_place: Any = None
        self._swallowed: tuple[Any, int] = (None, 0)
        """The place where the last exceptions to end the run were raised, and how many in a row."""

    @property
    def exit_code(self) -> int:
        """The exit code of a run ended by a signal."""
        return EXIT_INTERRUPTED if self.received == signal.SIGINT else EXIT_PREEMPTED

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A process forked by a dataset ends as it would outside a run.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        run, first, self.received = self.run, self.received is None, number
        self._heard_s = time.monotonic()
        if first:
            self._first_s, self.place = self._heard_s, user_place(frame)
            self._call_later(LATE_S, self._check_progress)
        drop_unread(sys.stdout, sys.stderr)
        if run is not None:
            run.stop_signal = number
        again = not self._several and self._heard_s - self._first_s > REPEATED_S
        again = again and (run is None or run.clock.cause != "saving")
        if again and not self._leaves:
            self._leaves = True
            # Code that swallows every exception, or a connection that hangs, must not keep the process alive.
            self._call_later(LAST_S, lambda: os._exit(self.exit_code))
        if number == signal.SIGINT and (run is None or not first):
            raise KeyboardInterrupt
        if self.closing:
            return
        ends_wait = not self._several or self._aborted or (run is not None and run.waits == "alone")
        if run is not None and first:
            when = ": it waits for data" if ends_wait and run.waits else " after this step"
            # The signal may have interrupted a write, and Python's streams reject a nested one.
            with contextlib.suppress(RuntimeError):
                self._display.note(f"stopping{when}{self.place}; saving a checkpoint")
        if ends_wait:
            self._end_wait()
        if run is not None and again:
            raise self._unsaved("again ")

    def watch(self, heard: socket.socket) -> None:
        """Abort the process group, then exit, if Python does not handle a signal that `heard` receives."""
        came_s: float | None = None
        with heard:
            while True:
                heard.settimeout(None if came_s is None else min(UNHANDLED_S, 1.0))
                with contextlib.suppress(TimeoutError):
                    if not (numbers := heard.recv(4096)):
                        return
                    # Torch's loaders use other signals for their workers.
                    if {*numbers} & {*CAUGHT, signal.SIGHUP, signal.SIGALRM}:
                        came_s = came_s or time.monotonic()
                run, now = self.run, time.monotonic()
                if came_s is None or self._heard_s > came_s - REPEATED_S:
                    came_s = None
                elif run is not None and run.clock.cause != "saving" and not someone_saves(run.folder):
                    late_s = now - came_s - self.patience_s(UNHANDLED_S)
                    if late_s > 0 and not self._aborted and run.device.type == "cuda":
                        self._aborted = True
                        # Aborting may hang, too.
                        threading.Thread(target=abort_process_group, daemon=True).start()
                    if late_s > LAST_S:
                        if signal.getsignal(DUMP) != signal.SIG_DFL:
                            os.kill(os.getpid(), DUMP)
                            time.sleep(0.5)
                        os._exit(self.exit_code)

    def _unsaved(self, why: str = "") -> Preempted:
        step = f"at step {self.run.progress.step}, without saving" if self.run else "before the first step"
        return Preempted(f"{signal.Signals(self.received or signal.SIGTERM).name} {why}{step}{self.place}")

    def _interrupt(self, error: Preempted) -> NoReturn:
        """Raise `error` in the running code, or exit if it has been swallowed repeatedly."""
        place = None if self.run is None else (self.run.progress.step, self.run.num_batches, self.run.waits)
        before, times = self._swallowed
        self._swallowed = place, times + 1 if place == before else 1
        if self._swallowed[1] > MOST_SWALLOWED:
            print(f"ptfast: {self._unsaved('in code that does not stop ')}", file=sys.stderr, flush=True)
            os._exit(self.exit_code)
        raise error

    def _end_wait(self) -> None:
        if self.run is None or self._aborted:
            self._interrupt(self._unsaved("while waiting for other ranks " * self._aborted))
        if self.run.waits:
            self._interrupt(Stopped())

    def _check_progress(self) -> None:
        """End a wait, or a step that hangs; called every `LATE_S` after the first signal."""
        run = self.run
        if self.closing:
            return
        self._call_later(LATE_S, self._check_progress)
        self._end_wait()
        assert run is not None
        saves = run.clock.cause == "saving"
        place = run.progress.step, run.num_batches, saves
        limit_s = self.patience_s(HUNG_TOGETHER_S if self._several else HUNG_S)
        if saves:
            # Weights, two moments of the optimizer, and an average.
            limit_s = SAVING_S + 4 * sum(p.nbytes for p in run.model.parameters()) / SLOW_DISK_BYTES_PER_S
        if place != self._last_place or (saves and self._several):
            self._last_place, self._moved_s = place, self._heard_s
        elif self._heard_s - self._moved_s > limit_s:
            if self._several or run.clock.cause in ("optimizer", "saving") or takes_own_steps(run.task):
                self._interrupt(self._unsaved("in a step that hangs "))
            self._interrupt(Stopped())

    @property
    def silent_s(self) -> float:
        """Return the seconds since Python last handled a signal, or one of the alarms that follow it."""
        return time.monotonic() - self._heard_s

    def patience_s(self, seconds: float) -> float:
        """Return `seconds`, or twice the usual time of a step if that is longer."""
        progress = self.run.progress if self.run is not None else None
        return max(seconds, 2 * progress.timed_s / max(progress.timed_steps, 1)) if progress else seconds

    def _call_later(self, seconds: float, act: Callable[[], None]) -> None:
        def awake(number: int, frame: FrameType | None) -> None:
            self._heard_s = time.monotonic()
            act()

        # Starting a thread takes locks that the interrupted code may have taken.
        signal.signal(signal.SIGALRM, awake)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def someone_saves(folder: Path) -> bool:
    """Return whether files of an unfinished checkpoint changed recently: ranks may wait for their writer."""
    newest_s = 0.0
    for file in (folder / "saved").glob(".step-*/*"):
        with contextlib.suppress(OSError):
            newest_s = max(newest_s, file.stat().st_mtime)
    return time.time() - newest_s < SAVING_S


_wakeup_fds: list[int] = []
"""The wakeup descriptor of signals, saved while this process forks."""


def _remove_wakeup_fd() -> None:
    with contextlib.suppress(ValueError):  # outside the main thread
        _wakeup_fds.append(signal.set_wakeup_fd(-1))


def _restore_wakeup_fd() -> None:
    if _wakeup_fds:
        signal.set_wakeup_fd(_wakeup_fds.pop(), warn_on_full_buffer=False)


def _forget_wakeup_fd() -> None:
    _wakeup_fds.clear()
    signal.set_wakeup_fd(-1)


# A child would write its own signals to the pipe of its parent.
os.register_at_fork(
    before=_remove_wakeup_fd, after_in_parent=_restore_wakeup_fd, after_in_child=_forget_wakeup_fd
)


@contextlib.contextmanager
def caught_signals(display: Any, ranks: Ranks) -> Iterator[Signals]:
    """Install the signal handlers; SIGHUP stays ignored if it is already, as under nohup.

    Outside the main thread of a program that calls ptfast, signals are left to that program.
    """
    if not on_main_thread():
        yield Signals(display, ranks)
        return
    caught = [*CAUGHT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        caught.append(signal.SIGHUP)
    handler = Signals(display, ranks)
    previous = {number: signal.getsignal(number) for number in (*caught, signal.SIGALRM)}
    for number in caught:
        signal.signal(number, handler)
    try:
        with contextlib.ExitStack() as stack:
            if ranks.distributed:
                heard, tell = socket.socketpair()
                stack.callback(tell.close)
                tell.setblocking(False)
                threading.Thread(target=handler.watch, args=(heard,), daemon=True).start()
                fd_before = signal.set_wakeup_fd(tell.fileno(), warn_on_full_buffer=False)
                stack.callback(signal.set_wakeup_fd, fd_before)
            yield handler
    finally:
        if handler.received is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, before in previous.items():
            signal.signal(number, before)
