"""Rewrite parts of a model without changing its formula."""

from __future__ import annotations

from ptfast.core.resolved import Resolved
from ptfast.core.sections.section import Family, OrAuto, Section


class Rewrites(Section):
    """Rewrites of the model that leave its formula as it is."""

    channels_last: bool | OrAuto = "auto"
    """Store images with the channels innermost; `auto` where that usually pays."""
    bias_before_norm: bool = True
    """Keep a layer's bias even if the following BatchNorm subtracts it again."""
    chunked_loss: bool = False
    """Compute the last layer of a language model and its loss together, a chunk of tokens at a time."""
    fused_rms_norm: bool = False
    """Compute RMS norms written in single operators by torch's kernel."""


def panel(rewrites: Rewrites, resolved: Resolved) -> dict[str, object]:
    """Describe the rewrites that took place; the memory format is shown with the model."""
    dropped = len(resolved.dropped_biases or ())
    return {
        "rewrites": f"{dropped} biases before a BatchNorm dropped" if dropped else None,
        "loss": "with the last layer, chunk by chunk" if rewrites.chunked_loss else None,
        "norms": f"{len(resolved.fused_norms)} RMS norms by torch's kernel"
        if rewrites.fused_rms_norm
        else None,
    }


FAMILY = Family(panel=panel)
