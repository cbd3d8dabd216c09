"""The display of a run: live on a terminal, plain lines anywhere else, nothing on other ranks."""

from __future__ import annotations

from typing import TextIO

from ptfast.report.terminal.output import is_terminal, standard_output
from ptfast.report.terminal.plain_display import Display, PlainDisplay
from ptfast.report.terminal.text_table import table

__all__ = ["Display", "PlainDisplay", "build_display", "is_terminal", "standard_output", "table"]


def build_display(rank: int = 0, stream: TextIO | None = None) -> Display:
    """The display that suits `stream` (standard output if not given); a silent one for ranks other than 0."""
    if rank != 0:
        return Display()
    stream = stream or standard_output()
    if not is_terminal(stream):
        return PlainDisplay(stream)
    from ptfast.report.terminal.live_display import LiveDisplay

    return LiveDisplay(stream)
