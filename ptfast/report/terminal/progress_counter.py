"""Progress of something that counts: a bar with the time left on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from typing import TextIO

from ptfast.core.errors import one_line
from ptfast.core.units import clock, grouped, num_bytes
from ptfast.report.terminal.display import is_terminal, standard_output

_BAR = 30
_REDRAW_S = 0.1


class Counter:
    """Shows a count on its way to a total.

    Args:
        what: is being done, such as `packing`.
        unit: what is counted, in the plural; `bytes` are shown in larger units of them.
        total: where it ends.
    """

    def __init__(
        self,
        what: str,
        unit: str,
        total: int,
        stream: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._unit, self._total = what, unit, total
        self._stream = stream or standard_output()
        self._now, self._redraws = now, is_terminal(self._stream)
        self._first: int | None = None
        self._start_s = self._next_s = now()
        self._drawn = False

    def show(self, count: int) -> None:
        """The count is at `count`; the first call says where it began, and the rate is from there on."""
        now = self._now()
        if self._first is None:
            self._first, self._start_s = count, now
        if now < self._next_s and count < self._total:
            return
        elapsed_s = now - self._start_s
        # The longer it takes, the further apart the lines are.
        self._next_s = now + (_REDRAW_S if self._redraws else min(30.0, max(1.0, elapsed_s / 20)))
        share = count / self._total if self._total else 1.0
        written = num_bytes if self._unit == "bytes" else grouped
        unit = "" if self._unit == "bytes" else f" {self._unit}"
        words = [f"{share:4.0%}", f"{written(count)}/{written(self._total)}{unit}"]
        if elapsed_s > 0 and count > self._first:
            rate = (count - self._first) / elapsed_s
            words += [f"{written(rate)}{unit}/s", f"eta {clock((self._total - count) / rate)}"]
        self._write(share, "  ".join(words))

    def close(self) -> None:
        """Leave the terminal at the start of a line of its own. Safe to call twice."""
        if self._drawn:
            self._drawn = False
            self._put("\r\x1b[K")

    def _write(self, share: float, text: str) -> None:
        if not self._redraws:
            self._put(f"{self._what} {text}\n")
            return
        filled = round(_BAR * share)
        encoding = (getattr(self._stream, "encoding", None) or "utf-8").lower()
        full, empty = ("━", "─") if encoding.startswith("utf") else ("#", "-")
        line = f"{self._what} {full * filled}{empty * (_BAR - filled)} {text}"
        self._put("\r" + one_line(line)[: shutil.get_terminal_size().columns - 1] + "\x1b[K")
        self._drawn = True

    def _put(self, text: str) -> None:
        # A reader that has gone must not end the work.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()
