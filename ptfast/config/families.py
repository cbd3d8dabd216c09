"""The families of techniques, with the rules for their keys. Importing them does not load torch."""

from __future__ import annotations

from ptfast import models, optim
from ptfast.core.sections.section import Family
from ptfast.data import loaders, sampling, transforms
from ptfast.techniques import (
    backend,
    checkpointing,
    compile,
    curriculum,
    debug,
    ema,
    gradients,
    numerics,
    parallel,
    precision,
    rewrites,
    schedule,
)

PARTS = (
    *(loaders, sampling, debug, optim, schedule, gradients),
    *(precision, backend, checkpointing, compile, rewrites, transforms, curriculum, ema),
    *(numerics, parallel, models),
)
"""The modules of the families, in the order of the table of techniques."""
FAMILIES: tuple[Family, ...] = tuple(part.FAMILY for part in PARTS)
