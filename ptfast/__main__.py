"""`python -m ptfast` and the `ptfast` command."""

import os
import sys
import time


def main() -> None:
    """Run the command line and exit with its code."""
    # The wall time of a run counts from here, imports included.
    os.environ.setdefault("PTFAST_STARTED", repr(time.time()))
    # Read when torch is imported. Threads that spin while they wait stand still beside a busy neighbour.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from ptfast.cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
