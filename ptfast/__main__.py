"""`python -m ptfast` and the `ptfast` command."""

import os
import sys
import time


def main() -> None:
    """Run the command line and exit with its code."""
    from ptfast.machine import process_age_s

    # The wall time of a run counts from there, the interpreter's own start and all imports included.
    os.environ.setdefault("PTFAST_STARTED", repr(time.time() - process_age_s()))
    # Read when torch is imported. Threads that spin while they wait stand still beside a busy neighbour.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from ptfast.cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
