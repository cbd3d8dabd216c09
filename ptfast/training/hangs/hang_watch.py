"""Detect a run without progress: write the stacks of all threads to a file, and end it if configured."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from ptfast.core.clock import Clock
from ptfast.core.distributed import Ranks, collectives_of_gpus
from ptfast.core.errors import ParallelError, error_line
from ptfast.core.run_directory import open_inside
from ptfast.core.units import short_time
from ptfast.training.hangs import hang_supervisor
from ptfast.training.hangs.deadlines import LAST_S, LATE_S, LEAST_S, TICK_S, TIMES, UNHEARD_S
from ptfast.training.hangs.hang_supervisor import BEAT, DUMP, HANDLED
from ptfast.training.stopping import Signals

SLOW_CAUSES = "start_up", "warm_up"
"""Phases that may take minutes: loading the data, and compiling."""


class HangWatch(contextlib.AbstractContextManager["HangWatch"]):
    """Checks in a thread whether a rank makes progress: new steps or batches, or another kind of work.

    After too long a pause, it writes the stacks of all threads and workers to `hang-rankN.txt` in the run
    directory, with NCCL's own records next to it, and a warning names the file. With `timeout_s`, the rank
    then raises P001 wherever its main thread is, or exits if that has no effect. Loading the data and
    compiling may take at least a minute with `timeout_s`, and any time without it.

    A separate process ends code that keeps the GIL or blocks the handling of a signal.

    Cost: a thread that checks once a second; a process of 9 MB that starts in 15 ms in the background.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        display: Any,
        clock: Clock,
        signals: Signals,
        timeout_s: float | None,
    ) -> None:
        self._ranks, self._display, self._clock, self._signals = ranks, display, clock, signals
        self._timeout_s, self._path = timeout_s, folder / f"hang-rank{ranks.rank}.txt"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ptfast-hang-watch", daemon=True)
        self._error: ParallelError | None = None

    def __enter__(self) -> HangWatch:
        self._file = open_inside(self._path, "a", encoding="utf-8")
        self._before = signal.signal(DUMP, self._raise)
        # Processes that are forked later inherit it.
        faulthandler.register(DUMP, self._file, chain=True)
        timeout_s = 0 if self._timeout_s is None else self._timeout_s + LAST_S
        command = [sys.executable, "-I", "-S", hang_supervisor.__file__]
        command += [str(os.getpid()), str(timeout_s), str(self._path)]
        self._supervisor = None
        # With several ranks, the launcher ends those that do not react to signals.
        if timeout_s or not self._ranks.distributed:
            # A machine may be unable to start a process: that alone must not end a run.
            with contextlib.suppress(OSError):
                self._supervisor = subprocess.Popen(
                    command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True
                )
        self._fd_before = None
        if self._supervisor is not None and not self._ranks.distributed:
            assert self._supervisor.stdin is not None
            os.set_blocking(self._supervisor.stdin.fileno(), False)
            self._fd_before = signal.set_wakeup_fd(self._supervisor.stdin.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._fd_before is not None:
            signal.set_wakeup_fd(self._fd_before)
        if self._supervisor is not None:
            self._supervisor.communicate()
        faulthandler.unregister(DUMP)
        signal.signal(DUMP, self._before)
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        with contextlib.suppress(OSError):
            if not self._path.stat().st_size:
                self._path.unlink()

    @property
    def _cause(self) -> str | None:
        return (self._clock if self._signals.run is None else self._signals.run.clock).cause

    def _watch(self) -> None:
        last, pause_s, longest_s, told = None, 0.0, 0.0, False
        while True:
            limit_s = self._timeout_s or max(LEAST_S, TIMES * longest_s)
            # It fires only if this thread does not get the GIL.
            faulthandler.dump_traceback_later(limit_s + LAST_S, file=self._file)
            self._beat()
            if self._over.wait(TICK_S):
                return
            run, cause = self._signals.run, self._cause
            place = (cause,) if run is None else (run.progress.step, run.num_batches, cause)
            if place != last:
                last, pause_s, longest_s, told = place, 0.0, max(longest_s, pause_s), False
            pause_s += TICK_S
            asked = self._is_asked(cause)
            if asked:
                limit_s = min(limit_s, self._signals.patience_s(LATE_S))
            elif cause in SLOW_CAUSES:
                limit_s = math.inf if self._timeout_s is None else max(limit_s, LEAST_S)
            if told or pause_s < limit_s:
                continue
            told = True
            at = "before the first step" if run is None else f"at step {run.progress.step}"
            what = f"no progress for {short_time(pause_s)} {at}, in {cause}"
            with contextlib.suppress(OSError):
                self._tell(what)
            what += f"; the stack of every thread is in {self._path}"
            with contextlib.suppress(OSError):
                if (trace := collectives_of_gpus()) is not None:
                    self._path.with_name(f"nccl_trace_rank_{self._ranks.rank}").write_bytes(trace)
            if self._timeout_s is None or asked:
                faulthandler.dump_traceback(self._file)
                self._display.warn(what)
            else:
                self._end(what)

    def _is_asked(self, cause: str | None) -> bool:
        """Return whether a signal has asked the run to end, and the run is neither saving nor closing."""
        return self._signals.received is not None and not self._signals.closing and cause != "saving"

    def _beat(self) -> None:
        """Tell the supervisor that Python runs here, and whether it handles signals."""
        if self._supervisor is None or self._supervisor.stdin is None:
            return
        patience_s = min(int(self._signals.patience_s(UNHEARD_S)), HANDLED - BEAT - 1)
        told = HANDLED if self._signals.received else BEAT + patience_s
        if self._is_asked(self._cause) and self._signals.silent_s > 3 * LATE_S:
            # Python handled one signal, but then none of the alarms that follow.
            told = signal.SIGTERM
        with contextlib.suppress(OSError):
            self._supervisor.stdin.write(bytes([told]))

    def _tell(self, what: str) -> None:
        """Write a line, and the stacks of the processes that load data."""
        print(what, file=self._file, flush=True)
        for file in Path("/proc/self/task").glob("*/children"):
            for pid in file.read_text().split():
                status = Path("/proc", pid, "status").read_text()
                found = re.search(r"State:\s+\w \((.*)\)[\s\S]*SigCgt:\s+(\w+)", status)
                if found is not None and int(found[2], 16) >> (DUMP - 1) & 1:
                    print(f"process {pid}, {found[1]}", file=self._file, flush=True)
                    os.kill(int(pid), DUMP)
                    time.sleep(0.1)
        print("this process", file=self._file, flush=True)

    def _end(self, what: str) -> None:
        """Raise an error in the main thread, or exit if that has no effect."""
        hint = "Raise run.hang_timeout if the pause was legitimate"
        self._error = error = ParallelError("P001", what, key="run.hang_timeout", suggestion=hint)
        signal.pthread_kill(threading.main_thread().ident or 0, DUMP)
        if not self._over.wait(LAST_S):
            print(error_line(error), file=sys.stderr, flush=True)
            os._exit(error.exit_code)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._error is not None:
            raise self._error
