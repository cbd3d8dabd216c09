"""Standard output: the display of a run, with a live line redrawn in place; plain lines; and tables."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import select
import sys
import textwrap
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TextIO

from ptfast.core.errors import one_line
from ptfast.core.plain_display import Display, Metrics, Rows
from ptfast.core.units import are_numbers, clock, listed
from ptfast.report.terminal.json_lines import JsonDisplay, JsonLines, emit_rows
from ptfast.report.terminal.notebook_display import NotebookDisplay, in_notebook

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live

REDRAW_S = 0.5
"""Shortest time between redraws of the live line; a redraw costs about 0.5 ms."""
MAX_WIDTH = 100
"""Largest width of a panel; longer lines are hard to read."""
UNREAD_S = 0.5
"""Seconds to wait for the other end of a pipe to read."""


def build_display(rank: int = 0, stream: TextIO | None = None) -> Display:
    """Return the display for `stream`, by default standard output; ranks other than 0 get a silent one."""
    if rank != 0:
        return Display()
    stream = stream or standard_output()
    if isinstance(stream, JsonLines):
        return JsonDisplay()
    if stream is sys.stdout and in_notebook():
        return NotebookDisplay(stream)
    return LiveDisplay(stream) if is_terminal(stream) else Display(stream)


def terminal_display() -> Display:
    """Return the display for a terminal or `--json`; a silent one for files and pipes."""
    stream = standard_output()
    return build_display() if is_terminal(stream) or isinstance(stream, JsonLines) else Display()


def say(text: str = "", stream: TextIO | None = None) -> None:
    """Print lines and flush; on a terminal, wrap them at spaces and indent continuation lines.

    In a notebook, text for standard error goes to standard output, because notebooks show stderr in red.
    """
    stream = standard_output() if stream is None or (stream is sys.stderr and in_notebook()) else stream
    text = "\n".join(map(one_line, text.split("\n")))
    if is_terminal(stream):
        import shutil

        wrapper = textwrap.TextWrapper(shutil.get_terminal_size().columns - 1)
        wrapper.break_long_words = wrapper.break_on_hyphens = False
        lines = []
        for line in text.split("\n"):
            wrapper.subsequent_indent = " " * (len(line) - len(line.lstrip()) + 2)
            lines.append(wrapper.fill(line))
        text = "\n".join(lines)
    print(text, file=stream, flush=True)


def standard_output() -> TextIO:
    """Return standard output; a buffer if the process has none."""
    return sys.stdout or io.StringIO()


def is_terminal(stream: TextIO) -> bool:
    """Return True if `stream` can redraw a line."""
    try:
        return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown", "")
    except ValueError:
        return False


def drop_unread(*streams: TextIO | None) -> None:
    """Discard further output of streams that are not being read, such as full pipes."""
    for stream in filter(None, streams):
        with contextlib.suppress(OSError, ValueError):  # if the stream has no file descriptor
            if not select.select([], [stream.fileno()], [], UNREAD_S)[1]:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


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
    """Print a table, with a ruled header on a terminal and as aligned text elsewhere; numbers align right.

    Args:
        grouped: rows are grouped by their first cell; on a terminal, that cell becomes a heading.
        muted: indices of the rows that a terminal shows dimmed.
        optional: headers of columns to drop on a narrow terminal, in this order.
        links: URLs for the last cell of each row, on a terminal.
    """
    stream = stream or standard_output()
    cells = [[one_line(str(cell)) for cell in row] for row in rows]
    if isinstance(stream, JsonLines):
        emit_rows(headers, cells, title)
    elif is_terminal(stream):
        _ruled_table(headers, cells, title, grouped, muted, optional, links, stream)
    else:
        plain, columns = Display(stream), [*zip(headers, *cells, strict=True)]
        if title:
            plain.note(title)
        widths = [max(map(len, column)) for column in columns]
        numeric = [are_numbers(cells) for _, *cells in columns]
        for row in zip(*columns, strict=True):
            padded = (
                cell.rjust(width) if is_number else cell.ljust(width)
                for cell, width, is_number in zip(row, widths, numeric, strict=True)
            )
            plain.note("  ".join(padded).rstrip())


def _ruled_table(
    headers: Sequence[str],
    cells: Sequence[Sequence[str]],
    title: str | None,
    grouped: bool,
    muted: Container[int],
    optional: Sequence[str],
    links: Sequence[str],
    stream: TextIO,
) -> None:
    """Print a table on a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.style import Style
    from rich.table import Table
    from rich.text import Text

    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    style: dict[str, Any] = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
    ruled = Table(title=title, title_justify="left", title_style="bold", **style)
    columns = dict(enumerate(zip(headers, *cells, strict=True)))
    if grouped:
        del columns[0]
    for name in optional:
        if _least_width(columns.values()) <= console.width:
            break
        columns = {place: column for place, column in columns.items() if column[0] != name}
    widths = _widths(list(columns.values()), console.width - 2 * len(columns))
    for (header, *column), width in zip(columns.values(), widths, strict=True):
        justify = "right" if are_numbers(column) else "left"
        ruled.add_column(Text(header), justify=justify, overflow="fold", width=width)
    group = None
    for number, row in enumerate(cells):
        if grouped and row[0] != group:
            group = row[0]
            ruled.add_row(Text(f"{group}:", style="bold cyan"))
        texts = [Text(row[place]) for place in columns]
        if number < len(links):
            texts[-1].stylize(Style(link=links[number]))
        ruled.add_row(*texts, style="dim" if number in muted else None)
    console.print(ruled)


def fits(columns: Sequence[Sequence[str]]) -> bool:
    """Return True unless standard output is a terminal too narrow for these columns, headers included."""
    stream = standard_output()
    if not is_terminal(stream):
        return True
    from rich.console import Console

    return _least_width(columns) <= Console(file=stream).width


def _least_width(columns: Iterable[Sequence[str]]) -> int:
    """Return the smallest width of a table that breaks no word, with two spaces per column."""
    return sum(width + 2 for width in _longest_words(columns))


def _longest_words(columns: Iterable[Sequence[str]]) -> list[int]:
    """Return the length of each column's longest unbreakable part: a word, a number, a short header."""
    widths = []
    for header, *cells in columns:
        words = [word for cell in cells for word in ([cell] if are_numbers([cell]) else cell.split())]
        words += [header] if len(header) < 12 else header.split()
        widths.append(max(map(len, words), default=0))
    return widths


def _widths(columns: Sequence[Sequence[str]], room: int) -> list[int] | list[None]:
    """Return widths that sum to `room` and break no word; None for each if all fit or none can."""
    natural = [max(map(len, column)) for column in columns]
    widths = _longest_words(columns)
    if sum(natural) <= room or sum(widths) > room:
        return [None] * len(columns)
    for _ in range(room - sum(widths)):
        narrowest = min(
            (n for n in range(len(widths)) if widths[n] < natural[n]), key=lambda n: widths[n] / natural[n]
        )
        widths[narrowest] += 1
    return widths


class LiveDisplay(Display):
    """The display on a terminal: panels, a live line redrawn in place, and evaluations above it."""

    _live: Live | None = None
    _state: tuple[int, float, Mapping[str, Any], float | None] = (0, 0, {}, None)
    _drawn_s = 0.0

    @cached_property
    def _console(self) -> Console:
        from rich.console import Console

        class QuietWhenGone(Console):
            def on_broken_pipe(self) -> None:
                # The inherited method exits the process.
                self.quiet = True

        return QuietWhenGone(
            file=self._stream, force_terminal=True, highlight=False, markup=False, emoji=False
        )

    def panel(self, title: str, rows: Rows, loud: Sequence[str] = (), style: str = "cyan") -> None:
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in rows:
            grid.add_row(Text(one_line(name)), Text(one_line(value)))
        warnings = [Text(f"! {one_line(text)}", style="bold yellow") for text in loud]
        width = min(self._console.width, MAX_WIDTH)
        box = Panel(
            Group(grid, *warnings),
            title=Text(one_line(title), style=f"bold {style}"),
            title_align="left",
            border_style=style,
            expand=False,
            padding=(0, 1),
        )
        self._show(box, width=width)

    @contextlib.contextmanager
    def status(self, text: str, left_s: float | None = None) -> Iterator[None]:
        from rich.live import Live
        from rich.spinner import Spinner
        from rich.text import Text

        self.close()
        end_s = None if left_s is None else self._now() + left_s
        spinner = Spinner("dots", style="status.spinner")

        def draw() -> Spinner:
            eta = "" if end_s is None else f"  eta {clock(end_s - self._now())}"
            spinner.update(text=Text(one_line(text) + eta))
            return spinner

        # Refresh rarely, because the code inside may be timed.
        with Live(get_renderable=draw, console=self._console, refresh_per_second=1, transient=True):
            yield

    def progress(self, step: int, epoch: float, metrics: Metrics) -> None:
        self._state = (step, epoch, metrics, self._estimate(step))
        now = self._now()
        if self._live is not None and now - self._drawn_s < REDRAW_S:
            return
        self._drawn_s = now
        with contextlib.suppress(OSError, ValueError):
            if self._live is None:
                from rich.live import Live

                self._live = Live(
                    self,  # pyright: ignore[reportArgumentType]
                    console=self._console,
                    auto_refresh=False,
                    transient=True,
                    redirect_stdout=sys.stdout.isatty(),
                    redirect_stderr=sys.stderr.isatty(),
                )
                atexit.register(self.close)
                self._live.start()
                # Show the cursor, because it would stay hidden after a SIGKILL.
                self._console.show_cursor(True)
            self._live.refresh()

    def evaluation(
        self, step: int, epoch: float, split: str, metrics: Metrics, is_best: bool = False, weights: str = ""
    ) -> None:
        from rich.text import Text

        line = Text()
        line.append(f"{self._where(step, epoch)}  ", style="dim")
        line.append(one_line(f"{split:<4}  {listed(metrics, weights)}"))
        if is_best:
            line.append("  best", style="bold green")
        self._show(line)

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            atexit.unregister(self.close)
            with contextlib.suppress(OSError, ValueError):
                live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        fields = self._fields(*self._state)
        step, has_epoch, epoch = fields.pop("where").partition("  epoch ")
        fields = {"step": step, **({"epoch": f"epoch {epoch}"} if has_epoch else {}), **fields}
        # A narrow terminal drops the last fields first.
        order = ["loss", "eta", "samples_per_s", "step", "lr", "epoch", *fields]
        done = self._state[0] / self._total_steps if self._total_steps else None
        percent = "" if done is None else f" {done:4.0%}  "
        room = options.max_width + 1 - len(percent) - (0 if done is None else 8)
        shown: list[str] = []
        for name in dict.fromkeys(order):
            if name in fields and len(fields[name]) + 2 <= room:
                shown.append(name)
                room -= len(fields[name]) + 2
        line = Text(no_wrap=True, overflow="ellipsis")
        if done is not None:
            width = 8 + min(32, room)
            full = round(width * min(1.0, done))
            filled, empty = ("#", "-") if options.ascii_only else ("━", "─")
            line.append(filled * full, style="cyan").append(empty * (width - full), style="dim")
            line.append(percent)
        texts = (Text(fields[name], "bold" if name == "loss" else "") for name in fields if name in shown)
        line.append_text(Text("  ").join(texts))
        yield line

    def _print(self, text: str, *, copied: bool = False, style: str = "") -> None:
        from rich.text import Text

        # Lines wrapped by the terminal itself are copied as one line.
        self._show(Text(one_line(text), style=style), soft_wrap=copied)

    def _show(self, renderable: Any, **options: Any) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._console.print(renderable, **options)
