"""Write the tables of docs/reference/techniques.md from the catalogue: scripts/doc_tables.py"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ptfast.cli.listing_commands import ALWAYS_ON  # noqa: E402
from ptfast.config.catalogue import CATALOGUE, default_state  # noqa: E402
from ptfast.config.compose import compose  # noqa: E402
from ptfast.core.sections.section import Technique  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "techniques.md"
MARK = "<!-- Below: written by scripts/doc_tables.py -->"
"""The text above it on the page is written by hand."""
HEADINGS = {
    "Any model and machine": (),
    "Images": (
        *("augment", "model", "augmented batches from memory", "channels last", "no bias before batch norm"),
        *("progressive resizing", "test-time flip", "test-time shift"),
    ),
    "Text": ("batching", "sequence length warm-up", "chunked loss", "fused RMS norm"),
    "Data that loads slowly": ("dataloader",),
    "A CPU": ("threads by cores", "denormals flushed to zero"),
    "A GPU": (
        *("data on the device", "one kernel for a batch of images", "pinned memory"),
        *("transfers on a side stream", "cuDNN benchmark", "attention without cuDNN"),
    ),
    "Hardware with fast low precision": ("precision",),
    "A compiler": ("compile",),
    "Several GPUs": ("parallel",),
    "Little memory": ("checkpointing", "gradient accumulation", "adafactor", "expandable segments"),
    "A pretrained model": ("parameter groups",),
    "Large batches": ("batch", "lars", "lamb", "nvlamb", "novograd"),
    "A choice of optimizer": ("optimizer",),
    "A choice of schedule": ("schedule",),
}
"""What a reader has, and the families and techniques for it; the first heading has all others."""
ANYWHERE = ("fused optimizer step", "foreach optimizer step", "full last batch")
"""Techniques under the first heading whose family is under another."""
COLUMNS = (
    "| technique | class | on by default? | switch | why it is faster | when not |\n|---|---|---|---|---|---|"
)


def heading_of(technique: Technique) -> str:
    homes = {word: heading for heading, words in HEADINGS.items() for word in words}
    homes |= dict.fromkeys(ANYWHERE, next(iter(HEADINGS)))
    return homes.get(technique.name) or homes.get(technique.family) or next(iter(HEADINGS))


def techniques(text: str) -> str:
    """`text` with everything below its mark written anew: a table for each thing that a reader may have."""
    before, mark, _ = text.partition(MARK)
    assert mark, f"reference/techniques.md has lost its mark {MARK}"
    tree = compose([], complete=False).tree
    lines: list[str] = []
    for heading in HEADINGS:
        lines += ["", f"## {heading}", "", COLUMNS]
        for each in CATALOGUE:
            if heading_of(each) == heading:
                switch = "<br>".join(f"`{word}`" for word in each.on) or ALWAYS_ON
                cells = (each.name, each.kind, default_state(each, tree), switch, each.why, each.avoid)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([before + mark, *lines, ""])


if __name__ == "__main__":
    PAGE.write_text(techniques(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
