"""Standard output: the display of a run, and tables of runs, recipes and techniques."""

from __future__ import annotations

import io
import os
import shutil
import sys
import textwrap
from collections.abc import Container, Sequence
from typing import Any, TextIO

from ptfast.core.errors import one_line
from ptfast.core.units import are_numbers
from ptfast.report.terminal.plain_display import Display, PlainDisplay


def build_display(rank: int = 0, stream: TextIO | None = None) -> Display:
    """The display that suits `stream` (standard output if not given); a silent one for ranks other than 0."""
    if rank != 0:
        return Display()
    stream = stream or standard_output()
    if not is_terminal(stream):
        return PlainDisplay(stream)
    from ptfast.report.terminal.live_display import LiveDisplay

    return LiveDisplay(stream)


def terminal_display() -> Display:
    """The display of a terminal; a silent one where output is no terminal, or JSON for a program."""
    return build_display() if is_terminal(standard_output()) else Display()


def say(text: str = "", stream: TextIO | None = None) -> None:
    """Print lines at once; on a terminal each is broken between words, and goes on further to the right."""
    stream = stream or standard_output()
    text = "\n".join(map(one_line, text.split("\n")))
    if is_terminal(stream):
        wrapper = textwrap.TextWrapper(shutil.get_terminal_size().columns - 1)
        wrapper.break_long_words = wrapper.break_on_hyphens = False
        lines = []
        for line in text.split("\n"):
            wrapper.subsequent_indent = " " * (len(line) - len(line.lstrip()) + 2)
            lines.append(wrapper.fill(line))
        text = "\n".join(lines)
    print(text, file=stream, flush=True)


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
    optional: Sequence[str] = (),
    links: Sequence[str] = (),
    stream: TextIO | None = None,
) -> None:
    """Print a table: ruled on a terminal, aligned text elsewhere. Columns of numbers are set to the right.

    Args:
        grouped: rows with the same first cell stand together; on a terminal it is their heading.
        muted: numbers of the rows that a terminal shows faintly.
        optional: headers of columns that a narrow terminal leaves out, the first of them first.
        links: addresses that the last cells of the rows lead to on a terminal.
    """
    stream = stream or standard_output()
    cells = [[one_line(str(cell)) for cell in row] for row in rows]
    numeric = [are_numbers(column) for column in zip(*cells, strict=True)] or [False] * len(headers)
    if is_terminal(stream):
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.style import Style
        from rich.table import Table
        from rich.text import Text

        console = Console(file=stream, highlight=False, markup=False, emoji=False)
        look: dict[str, Any] = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
        ruled = Table(title=title, title_justify="left", title_style="bold", **look)
        columns = dict(enumerate(zip(headers, *cells, strict=True)))
        if grouped:
            del columns[0]
        for name in optional:
            if _least_width(list(columns.values())) <= console.width:
                break
            columns = {place: column for place, column in columns.items() if column[0] != name}
        widths = _widths(list(columns.values()), console.width - 2 * len(columns))
        for (place, column), width in zip(columns.items(), widths, strict=True):
            justify = "right" if numeric[place] else "left"
            ruled.add_column(Text(column[0]), justify=justify, overflow="fold", width=width)
        group = None
        for number, row in enumerate(cells):
            if grouped and row[0] != group:
                group = row[0]
                ruled.add_section()
                ruled.add_row(Text(group, style="bold cyan"))
            texts = [Text(row[place]) for place in columns]
            if number < len(links):
                texts[-1].stylize(Style(link=links[number]))
            ruled.add_row(*texts, style="dim" if number in muted else None)
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


def fits(columns: Sequence[Sequence[str]]) -> bool:
    """Return True unless standard output is a terminal too narrow for a table of these columns.

    Args:
        columns: their cells, headers included.
    """
    stream = standard_output()
    if not is_terminal(stream):
        return True
    from rich.console import Console

    return _least_width(columns) <= Console(file=stream).width


def _least_width(columns: Sequence[Sequence[str]]) -> int:
    """The width of a table that breaks no word."""
    return sum(_longest_word(column) + 2 for column in columns)


def _longest_word(column: Sequence[str]) -> int:
    """The longest of what stays in a line: words, numbers with their units, a short header such as `95 %`."""
    header, *cells = column
    words = [word for cell in cells for word in ([cell] if are_numbers([cell]) else cell.split())]
    return max(map(len, [*words, *([header] if len(header) < 12 else header.split())]), default=0)


def _widths(columns: Sequence[Sequence[str]], room: int) -> list[int] | list[None]:
    """Widths that sum to `room` and break no word, where columns are too wide for it and that can be had."""
    natural = [max(map(len, column)) for column in columns]
    widths = [_longest_word(column) for column in columns]
    if sum(natural) <= room or sum(widths) > room:
        return [None] * len(columns)
    for _ in range(room - sum(widths)):
        narrowest = min(
            (n for n in range(len(widths)) if widths[n] < natural[n]), key=lambda n: widths[n] / natural[n]
        )
        widths[narrowest] += 1
    return widths
