"""The pieces of a self-contained HTML page: frame, tiles and tables; every text is escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

STYLE_FILE = Path(__file__).with_name("style.css")

BADGES = {"finished": "good", "stopped": "good", "failed": "bad"}


def page(title: str, body: str) -> str:
    """A whole HTML document around `body`, which is HTML already."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{STYLE_FILE.read_text()}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def header(title: str, status: str | None, sub: str) -> str:
    """The head of a page, with the run's status beside the title."""
    badge = ""
    if status:
        badge = f'<span class="badge {BADGES.get(status, "fair")}">{escape(status)}</span>'
    return f'<h1>{escape(title)}{badge}</h1><p class="sub">{escape(sub)}</p>'


def tiles(figures: Sequence[tuple[str, str]]) -> str:
    """Key figures (name, value) in a row of tiles."""
    cells = (
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in figures
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def html_table(headers: Sequence[str], rows: Sequence[Sequence[str]], colors: Sequence[str] = ()) -> str:
    """A table whose first column is text and whose others are figures.

    Args:
        colors: the class of a colour swatch for each row, empty for none.
    """
    head = "".join(f"<th{_right(place)}>{escape(text)}</th>" for place, text in enumerate(headers))
    lines = []
    for index, row in enumerate(rows):
        swatch = f'<i class="{colors[index]}"></i>' if index < len(colors) else ""
        cells = "".join(
            f"<td{_right(place)}>{swatch if place == 0 else ''}{escape(text)}</td>"
            for place, text in enumerate(row)
        )
        lines.append(f"<tr>{cells}</tr>")
    return f'<div class="card"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """A table of names and what they are."""
    lines = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    return f'<div class="card tall facts"><table>{lines}</table></div>'


def _right(place: int) -> str:
    return ' class="num"' if place else ""
