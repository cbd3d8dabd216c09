"""Memory for time: activations that the backward pass computes again."""

from __future__ import annotations

from typing import Literal

from ptfast.core.errors import ConfigError, PtfastError
from ptfast.core.resolved import Resolved
from ptfast.core.sections.section import Count, Family, Section, Share, Unused
from ptfast.techniques.compile import Compile


class Checkpointing(Section):
    """Activations that backward computes again."""

    mode: Literal["none", "full", "every_n", "selective", "budget"] = "none"
    """The part computed again: all of blocks, of every n-th, their cheap parts, or the compiler's choice."""
    blocks: str | tuple[str, ...] = "auto"
    """A pattern or patterns of module names, such as `layers.*`; `auto` for the blocks that recur."""
    every: Count | None = None
    """For `every_n`: 2 takes every second block."""
    memory_budget: Share | None = None
    """For `budget`: the share that is kept of what a compiled model keeps."""


def what_the_mode_needs(checkpointing: Checkpointing, compile: Compile) -> PtfastError | None:
    """Refuse a budget without a compiler, and a mode without its figure."""
    mode = checkpointing.mode
    if mode == "budget" and compile.mode in ("none", "pointwise"):
        what = "only the compiler can keep a memory budget"
        hint = "Set compile=model, or use checkpointing=full"
        return ConfigError("C011", what, key="checkpointing", value=mode, suggestion=hint)
    for name, owner, usual in (("every", "every_n", 2), ("memory_budget", "budget", 0.5)):
        if mode == owner and getattr(checkpointing, name) is None:
            what, key = f"needed by checkpointing={mode}", f"checkpointing.{name}"
            return ConfigError("C016", what, key=key, suggestion=f"Set {key}={usual}")
    return None


def panel(checkpointing: Checkpointing, resolved: Resolved) -> dict[str, object]:
    """Activations that the backward pass computes again."""
    if checkpointing.mode == "none":
        return {"checkpointing": None}
    if checkpointing.mode == "budget":
        return {"checkpointing": f"the compiler keeps {checkpointing.memory_budget:.0%} of the activations"}
    blocks = resolved.checkpointed
    what = "cheap operations" if checkpointing.mode == "selective" else "all"
    which = f"{blocks[0]} to {blocks[-1]}" if len(blocks) > 1 else blocks[0]
    every = f", 1 in {checkpointing.every}" if checkpointing.mode == "every_n" else ""
    plural = "s" * (len(blocks) > 1)
    return {"checkpointing": f"{what} in {len(blocks)} block{plural} computed again ({which}{every})"}


FAMILY = Family(
    rules=(what_the_mode_needs,),
    unused=(
        Unused.unless("checkpointing.mode", ("every_n",), "checkpointing.every"),
        Unused.unless("checkpointing.mode", ("budget",), "checkpointing.memory_budget"),
        Unused.unless("checkpointing.mode", ("full", "every_n", "selective"), "checkpointing.blocks"),
    ),
    panel=panel,
)
