"""What happens to steps whose loss or gradients are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ptfast.core.errors import ConfigError, PtfastError
from ptfast.core.sections.section import Count, Family, Section, Unused
from ptfast.techniques.compile import Compile


class Numerics(Section):
    """The treatment of steps whose loss or gradients are not finite."""

    mode: Literal["stop", "skip"] = "stop"
    """End the run, or leave such steps out."""
    limit: Count = 10
    """Steps in a row that may be left out; then the run ends."""


def steps_that_can_be_skipped(numerics: Numerics, compile: Compile) -> Iterator[PtfastError]:
    """Refuse what cannot leave a step out."""
    if numerics.mode == "stop":
        return
    if compile.mode == "step":
        what = "a step compiled whole shows no gradients that could be checked before it is taken"
        hint = "Use compile=model, or numerics=stop"
        yield ConfigError("C011", what, key="numerics", value=numerics.mode, suggestion=hint)


FAMILY = Family(
    name="numerics",
    rules=(steps_that_can_be_skipped,),
    unused=(Unused.unless("numerics.mode", ("skip",), "numerics.limit"),),
    free_keys=("numerics",),
)
