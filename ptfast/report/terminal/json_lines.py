"""`--json`: print the output of a command as one JSON object per line (docs/reference/json.md)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from ptfast.core.errors import PtfastError, ReportedError, exit_code_of, one_line, text_of, traceback_of
from ptfast.core.plain_display import Display, Metrics, Rows
from ptfast.core.run_directory import plain_json
from ptfast.core.sections.secret_values import SECRET, hide_credentials, is_secret

VERSION = 1
"""Increased if a field changes its meaning or is removed; fields and events may be added at any time."""
VARIABLE = "PTFAST_JSON"
"""Environment variable that turns on JSON output in subprocesses."""


class JsonLines(io.TextIOBase):
    """Standard output on which each line is a JSON object, including prints of user code.

    A printed JSON object becomes a `row` event, any other line a `text` event.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream, self._part = stream, ""

    def emit(self, event: str, facts: Mapping[str, Any]) -> None:
        """Write an event as an object; non-finite numbers become null."""
        # These come first in the line, and printed fields cannot override them.
        own = {"v": VERSION, "event": event}
        line = json.dumps(plain_json(own | dict(facts) | own), default=str)
        self.stream.write(line + "\n")
        self.stream.flush()

    def write(self, text: str) -> int:
        *lines, self._part = (self._part + text).split("\n")
        for line in filter(str.strip, lines):
            found = None
            if line.startswith("{"):
                with contextlib.suppress(ValueError):
                    found = json.loads(line)
            self.emit("text", {"text": line}) if found is None else self.emit("row", found)
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()


def lines() -> JsonLines | None:
    """Return standard output if it is a `JsonLines`; None otherwise."""
    return sys.stdout if isinstance(sys.stdout, JsonLines) else None


@contextlib.contextmanager
def as_json() -> Iterator[None]:
    """Write objects to standard output inside this context, in this process and its ranks."""
    if lines() is not None or sys.stdout is None:
        yield
        return
    before, sys.stdout = sys.stdout, JsonLines(sys.stdout)
    outer = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        sys.stdout.write("\n")  # end a last line that lacks a newline
        sys.stdout = before
        os.environ.pop(VARIABLE)
        if outer is not None:
            os.environ[VARIABLE] = outer


def emit(event: str, **facts: Any) -> bool:
    """Write an event if this command prints JSON; return whether it does."""
    if (found := lines()) is not None:
        found.emit(event, facts)
    return found is not None


def emit_error(error: BaseException, *, details: bool = False) -> bool:
    """Emit an event for an error and each further one it carries; `details` adds a traceback."""
    common: dict[str, Any] = {"exit_code": exit_code_of(error)}
    if details:
        common["traceback"] = traceback_of(error)
    if isinstance(error, ReportedError) and error.error is not None:
        error = error.error
    if not isinstance(error, PtfastError):
        what = text_of(error) or type(error).__name__
        return emit("error", code=None, what=one_line(what), **common)
    for each in (error, *error.others):
        parts: dict[str, Any] = each.parts | {"message": str(each)}
        if each.key and is_secret(each.key, misspelt=each.code == "C002"):
            parts["value"] = SECRET
        texts = {name: part if part is None else hide_credentials(str(part)) for name, part in parts.items()}
        emit("error", **texts, **common)
    return lines() is not None


def emit_rows(headers: Sequence[str], rows: Sequence[Sequence[str]], title: str | None) -> bool:
    """Emit an event for each row of a table, with its cells by column name."""
    names = [re.sub(r"\W+", "_", header).strip("_") or "name" for header in headers]
    for row in rows if lines() is not None else ():
        emit("row", **({"table": title} if title else {}), **dict(zip(names, row, strict=True)))
    return lines() is not None


class JsonDisplay(Display):
    """The display of a run under `--json`: an event for each panel, progress line, evaluation and warning."""

    def panel(self, title: str, rows: Rows, loud: Sequence[str] = (), style: str = "cyan") -> None:
        emit("panel", title=title, rows=[list(row) for row in rows if any(row)], warnings=list(loud))

    @contextlib.contextmanager
    def status(self, text: str, left_s: float | None = None) -> Iterator[None]:
        emit("status", text=text, left_s=left_s)
        yield

    def progress(self, step: int, epoch: float, metrics: Metrics) -> None:
        eta_s = self._estimate(step)
        if self._is_due():
            emit("progress", step=step, epoch=epoch, total_steps=self._total_steps, eta_s=eta_s, **metrics)

    def evaluation(
        self, step: int, epoch: float, split: str, metrics: Metrics, is_best: bool = False, weights: str = ""
    ) -> None:
        place = {"step": step, "epoch": epoch, "split": split, "weights": weights or "last"}
        emit("evaluation", **place, is_best=is_best, **metrics)

    def warn(self, text: str) -> None:
        emit("warning", text=text)

    def finish(self, summary: Mapping[str, Any]) -> None:
        emit("result", **summary)

    def _print(self, text: str, *, copied: bool = False, style: str = "") -> None:
        emit("text", text=text)
