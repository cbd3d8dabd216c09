"""The catalogue of techniques: one record each, by family, as plain data without torch."""

from __future__ import annotations

from ptfast import optim
from ptfast.core.technique import PROMISES, Kind, Need, Technique
from ptfast.data import loaders, sampling, transforms
from ptfast.data.loaders import transfer_records
from ptfast.optim import parameter_records
from ptfast.techniques import (
    backend,
    checkpointing,
    compile,
    curriculum,
    debug,
    ema,
    gradients,
    loop_practices,
    parallel,
    precision,
    regularisation,
    rewrites,
    schedule,
)

__all__ = ["CATALOGUE", "PROMISES", "Kind", "Need", "Technique"]

CATALOGUE: tuple[Technique, ...] = (
    *loaders.TECHNIQUES,
    *sampling.TECHNIQUES,
    *debug.TECHNIQUES,
    *transfer_records.TECHNIQUES,
    *optim.TECHNIQUES,
    *schedule.TECHNIQUES,
    *gradients.TECHNIQUES,
    *parameter_records.TECHNIQUES,
    *precision.TECHNIQUES,
    *backend.TECHNIQUES,
    *checkpointing.TECHNIQUES,
    *compile.TECHNIQUES,
    *rewrites.TECHNIQUES,
    *transforms.TECHNIQUES,
    *curriculum.TECHNIQUES,
    *regularisation.TECHNIQUES,
    *ema.TECHNIQUES,
    *parallel.TECHNIQUES,
    *loop_practices.TECHNIQUES,
)
"""Every technique, in the order of the README's table."""
