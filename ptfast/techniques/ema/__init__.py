"""Evaluate a model with an average of its weights."""

from __future__ import annotations

from typing import Annotated

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, PtfastError
from ptfast.core.sections.coerce import InUnit
from ptfast.core.sections.section import Every, Family, OpenFraction, Section, Unused


class Ema(Section):
    """The average of the weights that evaluation uses instead of the weights."""

    decay: OpenFraction | None = None
    """Fraction of the moving average kept in each step, such as 0.999; null for no moving average."""
    warmup: bool = False
    """Keep less in the first steps: 1 - step ** (-2/3), up to `decay`, as timm does; for short runs."""
    swa_start: Annotated[Duration, InUnit("epochs")] | None = None
    """Start of an average with equal weights (SWA), such as `75%`; null for no such average."""
    swa_every: Every = Duration(1, "epochs")
    """Interval between the weights that SWA averages, such as `1epochs` or `100steps`."""


def one_average(ema: Ema) -> PtfastError | None:
    """Reject two averages of the weights, because only one could be evaluated."""
    if ema.decay is None or ema.swa_start is None:
        return None
    what, hint = f"contradicts ema.decay={ema.decay:g}", "Set one of the two to null"
    return ConfigError("C011", what, key="ema.swa_start", value=ema.swa_start, suggestion=hint)


FAMILY = Family(
    rules=(one_average,),
    unused=(
        Unused.without("ema.swa_start", "75%", "ema.swa_every"),
        Unused.without("ema.decay", "0.999", "ema.warmup"),
    ),
)
