"""Standard output: the display of a run, and tables of runs, recipes and techniques."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Container, Sequence
from typing import Any, TextIO

from ptfast.core.errors import one_line
from ptfast.core.units import are_numbers
from ptfast.report.terminal.plain_display import Display, PlainDisplay

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


def standard_output() -> TextIO:
    """Standard output; a buffer nobody reads where the process has none."""
    return sys.stdout or io.StringIO()


def is_terminal(stream: TextIO) -> bool:
    """Return True if `stream` can redraw a line."""
    try:
        return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown", "")
    except ValueError:
        return False


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str | None = None,
    grouped: bool = False,
    muted: Container[int] = (),
    stream: TextIO | None = None,
) -> None:
    """Print a table: ruled on a terminal, aligned text elsewhere. Columns of numbers are set to the right.

    Args:
        grouped: rows with the same first cell stand together; on a terminal it is their heading.
        muted: numbers of the rows that a terminal shows faintly.
    """
    stream = stream or standard_output()
    cells = [[one_line(str(cell)) for cell in row] for row in rows]
    numeric = [are_numbers(column) for column in zip(*cells, strict=True)] or [False] * len(headers)
    if is_terminal(stream):
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = Console(file=stream, highlight=False, markup=False, emoji=False)
        look: dict[str, Any] = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
        ruled = Table(title=title, title_justify="left", title_style="bold", **look)
        columns = list(zip(headers, *cells, strict=True))[grouped:]
        widths = _widths(columns, console.width - 2 * len(columns))
        for (header, *_), is_number, width in zip(columns, numeric[grouped:], widths, strict=True):
            justify = "right" if is_number else "left"
            ruled.add_column(Text(header), justify=justify, overflow="fold", width=width)
        group = None
        for number, row in enumerate(cells):
            if grouped and row[0] != group:
                group = row[0]
                ruled.add_section()
                ruled.add_row(Text(group, style="bold cyan"))
            ruled.add_row(*(Text(cell) for cell in row[grouped:]), style="dim" if number in muted else None)
        console.print(ruled)
        return
    plain = PlainDisplay(stream)
    if title:
        plain.note(title)
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    for row in [list(headers), *cells]:
        padded = [
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(row, widths, numeric, strict=True)
        ]
        plain.note("  ".join(padded).rstrip())


def _widths(columns: Sequence[Sequence[str]], room: int) -> list[int] | list[None]:
    """Widths that sum to `room` and break no word, where columns are too wide for it and that can be had."""
    natural = [max(map(len, column)) for column in columns]
    widths = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    if sum(natural) <= room or sum(widths) > room:
        return [None] * len(columns)
    for _ in range(room - sum(widths)):
        narrowest = min(
            (n for n in range(len(widths)) if widths[n] < natural[n]), key=lambda n: widths[n] / natural[n]
        )
        widths[narrowest] += 1
    return widths
