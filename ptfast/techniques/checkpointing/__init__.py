"""Activation checkpointing: trade time for memory by recomputing activations in the backward pass."""

from __future__ import annotations

from typing import Literal

from ptfast.core.auto_choices import AutoChoices
from ptfast.core.errors import ConfigError, PtfastError
from ptfast.core.sections.section import Count, Family, OpenFraction, Section, Unused
from ptfast.techniques.compile import Compile


class Checkpointing(Section):
    """Recomputation of activations in the backward pass."""

    mode: Literal["none", "full", "every_n", "selective", "budget"] = "none"
    """The part to recompute: all blocks, every n-th one, their cheap parts, or the compiler's choice."""
    blocks: str | tuple[str, ...] = "auto"
    """One or more patterns of module names, such as `layers.*`; `auto` for the repeated blocks."""
    every: Count | None = None
    """For `every_n`: 2 takes every second block."""
    memory_budget: OpenFraction | None = None
    """For `budget`: fraction to keep of the memory that a compiled model keeps."""


def what_the_mode_needs(checkpointing: Checkpointing, compile: Compile) -> PtfastError | None:
    """Reject a memory budget without compilation, and a mode without its setting."""
    mode = checkpointing.mode
    if mode == "budget" and compile.mode == "none":
        what = "only the compiler can follow a memory budget"
        hint = "Set compile=model, or use checkpointing=full"
        return ConfigError("C011", what, key="checkpointing", value=mode, suggestion=hint)
    for name, owner, usual in (("every", "every_n", 2), ("memory_budget", "budget", 0.5)):
        if mode == owner and getattr(checkpointing, name) is None:
            what, key = f"needed by checkpointing={mode}", f"checkpointing.{name}"
            return ConfigError("C016", what, key=key, suggestion=f"Set {key}={usual}")
    return None


def panel(checkpointing: Checkpointing, choices: AutoChoices) -> dict[str, object]:
    """Describe the activations that the backward pass recomputes."""
    if checkpointing.mode == "none":
        return {"checkpointing": None}
    if checkpointing.mode == "budget":
        return {"checkpointing": f"the compiler keeps {checkpointing.memory_budget:.0%} of the activations"}
    blocks = choices.get("checkpointed")
    what = "cheap operations" if checkpointing.mode == "selective" else "all"
    which = f"{blocks[0]} to {blocks[-1]}" if len(blocks) > 1 else blocks[0]
    every = f", 1 in {checkpointing.every}" if checkpointing.mode == "every_n" else ""
    plural = "s" * (len(blocks) > 1)
    return {"checkpointing": f"{what} in {len(blocks)} block{plural} recomputed ({which}{every})"}


FAMILY = Family(
    rules=(what_the_mode_needs,),
    unused=(
        Unused.unless("checkpointing.mode", ("every_n",), "checkpointing.every"),
        Unused.unless("checkpointing.mode", ("budget",), "checkpointing.memory_budget"),
        Unused.unless("checkpointing.mode", ("full", "every_n", "selective"), "checkpointing.blocks"),
    ),
    panel=panel,
)
