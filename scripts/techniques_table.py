"""Write the tables of docs/techniques.md anew, from the catalogue: scripts/techniques_table.py"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ptfast.cli.techniques_command import markdown  # noqa: E402

PAGE = ROOT / "docs" / "techniques.md"
MARK = "<!-- Below: written by scripts/techniques_table.py -->"
"""What stands above it on the page is written by hand."""


def written(text: str) -> str:
    """`text` with everything below its mark written anew: a heading and a table for each family."""
    before, mark, _ = text.partition(MARK)
    assert mark, f"{PAGE.name} has lost its mark {MARK}"
    header, rule, *rows = markdown().splitlines()
    lines: list[str] = []
    for row in rows:
        family = row.startswith("| **") and row.split("**")[1]
        lines += ["", f"## {family}", "", header, rule] if family else [row]
    return "\n".join([before + mark, *lines, ""])


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
