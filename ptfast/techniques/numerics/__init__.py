"""Handle steps whose loss or gradients are not finite."""

from __future__ import annotations

from typing import Literal

from ptfast.core.sections.section import Count, Family, Section, Unused


class Numerics(Section):
    """How to handle steps whose loss or gradients are not finite."""

    mode: Literal["stop", "skip"] = "stop"
    """End the run, or skip such steps."""
    limit: Count = 10
    """Maximum number of consecutive skipped steps; then the run ends."""


FAMILY = Family(
    unused=(Unused.unless("numerics.mode", ("skip",), "numerics.limit"),),
    free_keys=("numerics",),
)
