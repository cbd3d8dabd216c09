"""The display of a run in a notebook: a bar, a line and a table of evaluations, updated in place."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from html import escape
from typing import Any

from ptfast.core.plain_display import Display, Metrics
from ptfast.core.units import format_metric, grouped

REDRAW_S = 0.5
MOST_ROWS = 12
"""Rows of the table of evaluations: the newest, and always the best."""


def in_notebook() -> bool:
    """Return True in a Jupyter kernel, which can show HTML; False for IPython in a terminal."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class NotebookDisplay(Display):
    """Shows progress and evaluations as a single cell output, without widgets."""

    _handle: Any = None
    _line = ""
    _share: float | None = None

    def start(self, *given: Any, **named: Any) -> None:
        super().start(*given, **named)
        self._rows: list[Mapping[str, str]] = []
        self._handle, self._drawn_s = None, float("-inf")

    def progress(self, step: int, epoch: float, metrics: Metrics) -> None:
        self._line = "  ".join(self._fields(step, epoch, metrics, self._estimate(step)).values()).rstrip()
        self._share = step / self._total_steps if self._total_steps else None
        if self._now() - self._drawn_s >= REDRAW_S:
            self._draw()

    def evaluation(
        self, step: int, epoch: float, split: str, metrics: Metrics, is_best: bool = False, weights: str = ""
    ) -> None:
        shown = {name.replace("_", " "): format_metric(name, value) for name, value in metrics.items()}
        place = {"step": grouped(step), "epoch": f"{epoch:.4g}", "split": f"{split} {weights}".strip()}
        self._rows.append({**place, **shown, "": "best" if is_best else ""})
        self._draw()

    def close(self) -> None:
        if self._handle is not None:
            self._draw()
            self._handle = None

    def _draw(self) -> None:
        """Update the cell output in place."""
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        self._drawn_s = self._now()
        earlier, rows = self._rows[:-MOST_ROWS], self._rows[-MOST_ROWS:]
        if earlier and not any(row[""] for row in rows):
            rows = [*[row for row in earlier if row[""]][-1:], *rows[1:]]
        names = [*dict.fromkeys(name for row in rows for name in row)]
        lines = [[row.get(name, "") for name in names] for row in rows]
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in line) for line in lines)
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        bar = (
            ""
            if self._share is None
            else f'<progress value="{self._share:.4f}" style="width:20em"></progress>'
        )
        table = f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>" if rows else ""
        content = {
            "text/plain": "\n".join([self._line, *("  ".join(line).rstrip() for line in [names, *lines])]),
            "text/html": f"{bar}<pre>{escape(self._line)}</pre>{table}",
        }
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
