"""Rewrite parts of a model without changing its formula."""

from __future__ import annotations

from ptfast.core.sections.section import Family, OrAuto, Section


class Rewrites(Section):
    """Rewrites of the model that do not change its formula."""

    channels_last: bool | OrAuto = "auto"
    """Store images with the channels innermost; `auto` where that usually pays."""
    bias_before_norm: bool = True
    """Keep a layer's bias even if the following BatchNorm subtracts it again."""
    chunked_loss: bool = False
    """Compute the last layer of a language model and its loss together, a chunk of tokens at a time."""
    fused_rms_norm: bool = False
    """Use torch's fused kernel for RMS norms that are written as single operators."""


FAMILY = Family(
    panel=lambda rewrites: {
        "loss": "with the last layer, chunk by chunk" if rewrites.chunked_loss else None,
    },
)
