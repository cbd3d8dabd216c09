"""Standard error and standard output of a command: its errors, and readers that leave."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import TextIO

UNREAD_S = 0.5
"""How long a reader may take for what was written."""


def say_starting() -> None:
    """Tell a terminal what goes on in the seconds in which there is nothing else to see."""
    from ptfast.report.terminal.display import is_terminal

    if is_terminal(sys.stderr) and os.environ.get("RANK", "0") == "0":
        print("reading the config, importing torch ...", file=sys.stderr, flush=True)


def print_error(line: str, details: str) -> None:
    flush(sys.stdout)
    from ptfast.report.terminal.display import say

    with contextlib.suppress(BrokenPipeError):
        if details:
            print(details, file=sys.stderr)
        say(line, sys.stderr)


def drop_unread(*streams: TextIO | None) -> None:
    """Have streams whose reader does not read, such as a full pipe, write nowhere from now on."""
    for stream in filter(None, streams):
        with contextlib.suppress(OSError, ValueError):  # of one that is no file
            if not select.select([], [stream.fileno()], [], UNREAD_S)[1]:
                _drop(stream)


def flush(*streams: TextIO | None) -> None:
    """Write what streams hold back; one whose reader has left writes nowhere from now on.

    Python would complain of what is left in it at exit.
    """
    for stream in filter(None, streams):
        try:
            stream.flush()
        except BrokenPipeError:
            _drop(stream)


def _drop(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
