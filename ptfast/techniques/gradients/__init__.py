"""Accumulate and clip gradients between backward and the optimizer's step."""

from __future__ import annotations

from ptfast.core.sections.section import Count, Family, Positive, Section


class Gradients(Section):
    """Treatment of gradients between backward and the optimizer's step."""

    accumulate: Count = 1
    """Micro-batches per rank in one optimizer step, unless `micro_batches` sets them."""
    clip_norm: Positive | None = None
    """Maximum global norm of the gradients."""
    clip_value: Positive | None = None
    """Maximum absolute value of each gradient entry."""
    clip_adaptive: Positive | None = None
    """Maximum norm of a unit's gradient relative to its weights' norm, such as 0.01; the head is exempt."""
    log_norm: bool = True
    """Log the global norm of the gradients before clipping as `grad_norm`."""


FAMILY = Family(
    panel=lambda gradients: {
        "clip norm": gradients.clip_norm,
        "clip value": gradients.clip_value,
        "clip adaptive": gradients.clip_adaptive and f"{gradients.clip_adaptive:g} of a unit's weights",
    },
)
