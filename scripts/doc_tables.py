"""Write the tables of docs/ that follow from the code: scripts/doc_tables.py

The tables of docs/techniques.md, from the catalogue; where techniques act in docs/extending.md; new options
in the table of docs/config.md.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ptfast.cli.listing_commands import ALWAYS_ON, in_order  # noqa: E402
from ptfast.config.catalogue import CATALOGUE  # noqa: E402
from ptfast.config.files import paths  # noqa: E402

DOCS = ROOT / "docs"
MARK = "<!-- Below: written by scripts/doc_tables.py -->"
"""The text above it on the page is written by hand."""
FOR_RECIPES = {
    *("adamw_onecycle", "adamw_gpt", "adamw_gpt2", "adamw_text", "adamw_finetune", "sgd_imagenet"),
    *("resnet_digits", "gpt2_124m", "muon_airbench94", "sgd_airbench96"),
}
"""Options with a recipe's numbers, which the table of groups leaves out."""
GROUP = re.compile(r"^\| `(\w+)` \| ((?:`\w+`(?: \([^()]*\))? ?)*)(.*) \|$")
"""A row of the table of groups: the group, its options with what is said of each, and what else is said."""


def techniques(text: str) -> str:
    """`text` with everything below its mark written anew: a heading and a table for each family."""
    before, mark, _ = text.partition(MARK)
    assert mark, f"techniques.md has lost its mark {MARK}"
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
    from ptfast.config.catalogue import FAMILIES
    from ptfast.training import build, step

    before, header, rest = text.partition("| stage | what acts there |\n|---|---|\n")
    assert header, "extending.md has lost its table of stages"
    calls = inspect.getsource(build.build)
    modules = {**vars(build), **vars(step)}
    acting = {stage for family in FAMILIES for stage in family.acts}
    rows = []
    for stage in sorted(acting, key=lambda stage: calls.find(f"{stage}(") % (len(calls) + 1)):
        code = inspect.getsource(modules[stage])
        found = [
            (code.find(name.rpartition(".")[2]), f"`{name.rpartition('.')[2]}` ({family.name})")
            for family in FAMILIES
            for name in family.acts.get(stage, ())
        ]
        rows.append(f"| `{stage}` | {', '.join(words for _, words in sorted(found))} |\n")
    return before + header + "".join(rows) + rest[re.match(r"(\|.*\n)*", rest).end() :]  # type: ignore[union-attr]


def groups(text: str) -> str:
    """`text` with each option that its group's row does not name behind those that it does."""
    before, heading, after = text.partition("## Groups and options\n")
    section, end, rest = after.partition("\n## ")
    lines = [_with_new_options(line) for line in section.splitlines()]
    return "".join([before, heading, "\n".join(lines), "\n" if section.endswith("\n") else "", end, rest])


def _with_new_options(line: str) -> str:
    row = GROUP.match(line)
    if row is None:
        return line
    group, listed, said = row.groups()
    new = [name for name in paths.options(group) if f"`{name}`" not in line and name not in FOR_RECIPES]
    if not new:
        return line
    names = " ".join(f"`{name}`" for name in new)
    gap = " " if listed.endswith(" ") else ""
    return f"| `{group}` | {listed.rstrip()} {names}{gap}{said} |"


if __name__ == "__main__":
    pages = {"techniques.md": techniques, "config.md": groups, "extending.md": stages}
    for page, written in pages.items():
        file = DOCS / page
        file.write_text(written(file.read_text(encoding="utf-8")), encoding="utf-8")
