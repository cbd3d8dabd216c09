"""Write the tables of docs/reference/techniques.md from the catalogue: scripts/doc_tables.py"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ptfast.cli.listing_commands import ALWAYS_ON, in_order  # noqa: E402
from ptfast.config.catalogue import CATALOGUE  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "techniques.md"
MARK = "<!-- Below: written by scripts/doc_tables.py -->"
"""The text above it on the page is written by hand."""


def techniques(text: str) -> str:
    """`text` with everything below its mark written anew: a heading and a table for each family."""
    before, mark, _ = text.partition(MARK)
    assert mark, f"reference/techniques.md has lost its mark {MARK}"
    lines: list[str] = []
    for family, members in itertools.groupby(in_order(CATALOGUE), key=lambda each: each.family):
        header = "| technique | class | switch | why it is faster | when not |\n|---|---|---|---|---|"
        lines += ["", f"## {family}", "", header]
        for each in members:
            switch = "<br>".join(f"`{word}`" for word in each.on) or ALWAYS_ON
            cells = (each.name, each.kind, switch, each.why, each.avoid)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([before + mark, *lines, ""])


if __name__ == "__main__":
    PAGE.write_text(techniques(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
