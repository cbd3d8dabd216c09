"""The catalogue of techniques: one record each, by family, as plain data without torch."""

from __future__ import annotations

from ptfast.techniques import (
    augment,
    backend,
    batching,
    checkpointing,
    compile,
    curriculum,
    dataloader,
    debug,
    evaluation,
    gradients,
    optimizer,
    parallel,
    parameters,
    precision,
    regularisation,
    rewrites,
    schedule,
    small_print,
    transfers,
)
from ptfast.techniques.record import PROMISES, Kind, Need, Technique

__all__ = ["CATALOGUE", "PROMISES", "Kind", "Need", "Technique"]

CATALOGUE: tuple[Technique, ...] = (
    *dataloader.TECHNIQUES,
    *batching.TECHNIQUES,
    *debug.TECHNIQUES,
    *transfers.TECHNIQUES,
    *optimizer.TECHNIQUES,
    *schedule.TECHNIQUES,
    *gradients.TECHNIQUES,
    *parameters.TECHNIQUES,
    *precision.TECHNIQUES,
    *backend.TECHNIQUES,
    *checkpointing.TECHNIQUES,
    *compile.TECHNIQUES,
    *rewrites.TECHNIQUES,
    *augment.TECHNIQUES,
    *curriculum.TECHNIQUES,
    *regularisation.TECHNIQUES,
    *evaluation.TECHNIQUES,
    *parallel.TECHNIQUES,
    *small_print.TECHNIQUES,
)
"""Every technique, in the order of the README's table."""
