"""Write the README's table of switches anew, from the catalogue: scripts/techniques_table.py"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ptfast.cli.techniques_command import in_readme  # noqa: E402

README = ROOT / "README.md"

if __name__ == "__main__":
    README.write_text(in_readme(README.read_text(encoding="utf-8")), encoding="utf-8")
