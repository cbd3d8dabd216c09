"""`python -m ptfast` and the `ptfast` command."""

import os
import sys
import time

WAITING = {"GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "1"}
"""Waiting policy of OpenMP's threads, GNU's and LLVM's: they spin for about a millisecond, then sleep.

Sleeping at once costs the time of waking up on a quiet machine, and spinning on costs a core that busy
neighbours would use (scripts/bench_waiting.py, docs/waiting.md)."""


def main() -> None:
    """Run the command line and exit with its code."""
    from ptfast.core.machine import process_age_s

    # The wall time of a run counts from there, the interpreter's own start and all imports included.
    os.environ.setdefault("PTFAST_STARTED", repr(time.monotonic() - process_age_s()))
    # Read when torch is imported.
    if not any(name in os.environ for name in ("OMP_WAIT_POLICY", *WAITING)):
        os.environ.update(WAITING)
    # Of a machine that is lost, torch would print C++ frames where we say it in a line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from ptfast.cli.command_line import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
