"""Standard output, and whether it is a terminal."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


def standard_output() -> TextIO:
    """Standard output; a buffer nobody reads where the process has none."""
    return sys.stdout or io.StringIO()


def is_terminal(stream: TextIO) -> bool:
    """Return True if `stream` can redraw a line."""
    try:
        return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown", "")
    except ValueError:
        return False
