"""What happens to steps whose loss or gradients are not finite."""

from __future__ import annotations

from typing import Literal

from ptfast.core.sections.section import Count, Family, Section, Unused


class Numerics(Section):
    """The treatment of steps whose loss or gradients are not finite."""

    mode: Literal["stop", "skip"] = "stop"
    """End the run, or leave such steps out."""
    limit: Count = 10
    """Steps in a row that may be left out; then the run ends."""


FAMILY = Family(
    unused=(Unused.unless("numerics.mode", ("skip",), "numerics.limit"),),
    free_keys=("numerics",),
)
