"""A separate process that ends a run if Python cannot, because code keeps the GIL or never returns.

This script imports only the standard library. While Python runs, the run sends a byte every second: `HANDLED`
if all signals so far are handled, else `BEAT` plus the seconds that a signal may wait. The number of each
signal that the run receives is also sent.
"""

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

BEAT, HANDLED = 65, 255
ENDING = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP
DUMP = signal.SIGVTALRM
"""Makes a run write the stacks of its threads, whatever they are doing."""


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, if the system reports it."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "Tt"
    return False


def watch(pid: int, timeout_s: float, file: str) -> None:
    """Kill process `pid` if it does not handle a signal in time or, with a timeout, runs no Python."""
    heard_s, asked_s, patience_s = time.monotonic(), None, 60.0
    while os.getppid() == pid:
        told = os.read(0, 4096) if select.select([0], [], [], 1.0)[0] else None
        if told == b"":
            return
        now = time.monotonic()
        for byte in told or b"":
            if byte in ENDING:
                asked_s = asked_s or now
            elif byte >= BEAT:
                heard_s = now
                if byte == HANDLED:
                    asked_s = None
                else:
                    patience_s = byte - BEAT
        if is_stopped(pid):
            # A stopped process is not timed.
            heard_s, asked_s = now, asked_s and now
        why = None
        if asked_s is not None and now - asked_s > patience_s:
            why = f"no signal has been handled for {patience_s:.0f} s"
        elif timeout_s and now - heard_s > timeout_s:
            why = f"no Python code has run for {now - heard_s:.0f} s"
        if why is not None:
            os.kill(pid, DUMP)
            time.sleep(1.0)
            place = f"the running code does not return; the stack of every thread is in {file}"
            print(f"ptfast: error[P001]: {why}: {place}. The process is killed.", file=sys.stderr, flush=True)
            os.kill(pid, signal.SIGKILL)
            return


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        watch(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
