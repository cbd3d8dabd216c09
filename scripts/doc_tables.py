"""Write the tables of docs/ that follow from the code: scripts/doc_tables.py

The tables of docs/reference/techniques.md, from the catalogue; where techniques act, in
docs/contributing/adding-a-part.md.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ptfast.cli.listing_commands import ALWAYS_ON, in_order  # noqa: E402
from ptfast.config.catalogue import CATALOGUE  # noqa: E402
from ptfast.config.families import PARTS  # noqa: E402

DOCS = ROOT / "docs"
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


def stages(text: str) -> str:
    """`text` with the table of what acts in which stage written anew, in the order of the calls."""
    from ptfast.training import build

    before, header, rest = text.partition("| stage | what acts there |\n|---|---|\n")
    assert header, "contributing/adding-a-part.md has lost its table of stages"
    called = [vars(build).get(name) for name in _called_in(build.build)]
    stages = [each for each in called if inspect.isfunction(each) and ".stages." in each.__module__]
    rows = []
    for stage in (build.build, *stages):
        if acting := _of_families(stage):
            words = ", ".join(f"`{name}` ({family})" for name, family in acting.items())
            rows.append(f"| `{stage.__name__}` | {words} |\n")
    return before + header + "".join(rows) + rest[re.match(r"(\|.*\n)*", rest).end() :]  # type: ignore[union-attr]


def _called_in(code: Any) -> list[str]:
    """The names that a function or class calls, or passes on, in their order."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(code))) if isinstance(node, ast.Call)]
    names = [each for call in calls for each in (call.func, *call.args) if isinstance(each, ast.Name)]
    names.sort(key=lambda name: (name.lineno, name.col_offset))
    return list(dict.fromkeys(name.id for name in names))


def _of_families(stage: Any) -> dict[str, str]:
    """The functions and classes of families that a stage and its helpers call, with the family's package."""
    module = sys.modules[stage.__module__]
    nodes = ast.walk(ast.parse(inspect.getsource(module)))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    home = {name.name: node.module or "" for node in imports for name in node.names}
    found: dict[str, str] = {}
    for name in _called_in(stage):
        for part in PARTS:
            if home.get(name, "").startswith(f"{part.__name__}."):
                found[name] = part.__name__.rpartition(".")[2]
        helper = vars(module).get(name)
        if inspect.isfunction(helper) and helper.__module__ == stage.__module__ and helper is not stage:
            found |= _of_families(helper)
    return found


if __name__ == "__main__":
    pages = {
        "reference/techniques.md": techniques,
        "contributing/adding-a-part.md": stages,
    }
    for page, written in pages.items():
        file = DOCS / page
        file.write_text(written(file.read_text(encoding="utf-8")), encoding="utf-8")
