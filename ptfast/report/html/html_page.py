"""Parts of a self-contained HTML page: frame, header and tables; they escape all text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from ptfast.core.units import are_numbers

STYLE_FILE = Path(__file__).with_name("style.css")

BADGES = {"finished": "good", "stopped": "good", "failed": "bad"}


def page(title: str, body: str, script: str = "") -> str:
    """Return an HTML document from a title, an HTML `body` and a trusted script."""
    body += f"\n<script>\n{script}</script>" if script else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{STYLE_FILE.read_text()}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def header(title: str, status: str | None, *subs: str) -> str:
    """Return the header of a page: the title, the run's status next to it, and the lines below."""
    badge = ""
    if status:
        badge = f'<span class="badge {BADGES.get(status, "fair")}">{escape(status)}</span>'
    lines = "<br>".join(escape(sub) for sub in subs if sub)
    return f'<h1>{escape(title)}{badge}</h1><p class="sub">{lines}</p>'


def html_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    colors: Sequence[str] = (),
    links: Sequence[str] = (),
) -> str:
    """Return an HTML table; columns of numbers align right.

    Args:
        colors: the CSS class of a color swatch for each row; empty for no swatches.
        links: the URL for the last cell of each row; empty for no links.
    """
    columns = zip(*rows, strict=True) if rows else [()] * len(headers)
    css = [' class="num"' if are_numbers(column) else "" for column in columns]
    lines = ["".join(f"<th{c}>{escape(text)}</th>" for c, text in zip(css, headers, strict=True))]
    for index, row in enumerate(rows):
        cells = [f"<td{c}>{escape(text)}</td>" for c, text in zip(css, row, strict=True)]
        if index < len(colors):
            cells[0] = f'<td class="first"><i class="{colors[index]}"></i>{escape(row[0])}</td>'
        if index < len(links):
            cells[-1] = f'<td{css[-1]}><a href="{escape(links[index])}">{escape(row[-1])}</a></td>'
        lines.append("".join(cells))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="card"><table>{body}</table></div>'
