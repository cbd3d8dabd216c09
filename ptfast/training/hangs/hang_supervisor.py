"""A process beside a run that ends it where Python cannot: code keeps Python's lock, or never returns.

Run as a script, with the standard library alone. Its input tells it each second that Python runs there:
`HANDLED` if the signals so far have been handled, else `BEAT` and the seconds that one may wait. Every signal
that comes there comes here, too, by its number.
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
"""Has a run write the stacks of its threads, whatever they do."""


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, where the system says so."""
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
            # No time passes for it.
            heard_s, asked_s = now, asked_s and now
        why = None
        if asked_s is not None and now - asked_s > patience_s:
            why = f"no signal has been handled for {patience_s:.0f} s"
        elif timeout_s and now - heard_s > timeout_s:
            why = f"no Python code has run for {now - heard_s:.0f} s"
        if why is not None:
            os.kill(pid, DUMP)
            time.sleep(1.0)
            place = f"the code that runs does not give way; where every thread stood is in {file}"
            print(f"ptfast: error[P001]: {why}: {place}. The process is killed.", file=sys.stderr, flush=True)
            os.kill(pid, signal.SIGKILL)
            return


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        watch(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
