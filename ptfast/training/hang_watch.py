"""A run that stands still: where all its threads are, in a file, and an end where one was asked for."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from types import FrameType

from ptfast.core.errors import ParallelError, error_line
from ptfast.core.units import short_time
from ptfast.run import Run

TICK_S = 1.0
LEAST_S, TIMES = 60.0, 10
"""How long a run may stand still unless the config says so: so many times the longest pause so far."""
LAST_S = 10.0
"""How long a rank that is to end may take to write its summary."""


class HangWatch(contextlib.AbstractContextManager["HangWatch"]):
    """Watches a rank while it trains, from a thread: whether batches and steps come, or its work changes.

    After too long a pause the stacks of all threads go to `hang-rankN.txt` in the run directory, and a line
    says so. With a `timeout_s` the rank then raises P001 wherever its main thread is, or leaves if that does
    not wake up: what was trained since the last save is lost. Code that holds Python's lock is written down
    ten seconds later and not ended. While the whole process is stopped no time passes; compiling counts only
    against a `timeout_s`.

    Cost: a thread that looks once a second.
    """

    def __init__(self, run: Run, timeout_s: float | None) -> None:
        self._run, self._timeout_s = run, timeout_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ptfast-hang-watch", daemon=True)
        self._error: ParallelError | None = None

    def __enter__(self) -> HangWatch:
        self._file = (self._run.folder / f"hang-rank{self._run.ranks.rank}.txt").open("a", encoding="utf-8")
        self._before = signal.signal(signal.SIGVTALRM, self._raise)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        signal.signal(signal.SIGVTALRM, self._before)
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        with contextlib.suppress(OSError):
            if not os.path.getsize(self._file.name):  # noqa: PTH202
                os.unlink(self._file.name)  # noqa: PTH108

    def _watch(self) -> None:
        run, last, pause_s, longest_s, told = self._run, None, 0.0, 0.0, False
        while True:
            limit_s = self._timeout_s or max(LEAST_S, TIMES * longest_s)
            # Fires only if this thread does not get Python's lock.
            faulthandler.dump_traceback_later(limit_s + LAST_S, file=self._file)
            if self._over.wait(TICK_S):
                return
            place = run.progress.step, run.num_batches, run.clock.cause
            if place != last:
                last, pause_s, longest_s, told = place, 0.0, max(longest_s, pause_s), False
            pause_s += TICK_S
            compiles = run.clock.cause == "warm_up" and self._timeout_s is None
            if pause_s < limit_s or told or compiles:
                continue
            told = True
            what = f"no progress for {short_time(pause_s)} at step {run.progress.step}, in {run.clock.cause}"
            with contextlib.suppress(OSError):
                print(what, file=self._file, flush=True)
                faulthandler.dump_traceback(self._file)
            what += f"; where every thread stands is in {self._file.name}"
            if self._timeout_s is None:
                run.display.warn(what)
            else:
                self._end(what)

    def _end(self, what: str) -> None:
        """Raise an error in the main thread, or leave if it does not take it."""
        hint = "Raise run.hang_timeout if it would have gone on"
        self._error = error = ParallelError("P001", what, key="run.hang_timeout", suggestion=hint)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGVTALRM)
        if not self._over.wait(LAST_S):
            print(error_line(error), file=sys.stderr, flush=True)
            os._exit(error.exit_code)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._error is not None:
            raise self._error
