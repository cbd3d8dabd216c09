"""`python -m ptfast` and the `ptfast` command."""

import os
import sys
import time

WAITING = {"GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "1"}
"""Waiting policy of OpenMP's threads, GNU's and LLVM's: they spin for about a millisecond, then sleep.

Sleeping at once costs wake-up time on a quiet machine; spinning longer takes cores from busy neighbors
(scripts/bench_waiting.py, docs/evidence/waiting-threads.md)."""


def main() -> None:
    """Run the command line and exit with its code."""
    # A run's wall time includes all imports.
    os.environ.setdefault("PTFAST_STARTED", repr(time.monotonic()))
    # OpenMP reads these when torch is imported.
    if not any(name in os.environ for name in ("OMP_WAIT_POLICY", *WAITING)):
        os.environ.update(WAITING)
    # torch would print C++ frames about a lost machine; ptfast reports it in one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from ptfast.cli.command_line import run
    from ptfast.core.plain_display import LastingOutput, show_warnings_once

    show_warnings_once()
    LastingOutput.install()
    sys.exit(LastingOutput.exit_code(run(sys.argv[1:])))


if __name__ == "__main__":
    main()
