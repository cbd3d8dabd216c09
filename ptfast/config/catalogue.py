"""Records, rules and keys without effect, collected from the families that own them. No torch is loaded."""

from __future__ import annotations

from ptfast import models, optim
from ptfast.core.errors import ConfigError
from ptfast.core.sections.nearest_name import did_you_mean
from ptfast.core.sections.technique import PROMISES, Family, Kind, Need, Technique
from ptfast.data import decoding, loaders, sampling, transforms
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
    rewrites,
    schedule,
)

__all__ = ["CATALOGUE", "FAMILIES", "PROMISES", "Kind", "Need", "Technique"]

FAMILIES: tuple[Family, ...] = tuple(
    part.FAMILY
    for part in (
        *(loaders, sampling, decoding, debug, optim, schedule, gradients),
        *(precision, backend, checkpointing, compile, rewrites, transforms, curriculum, ema),
        *(parallel, models, loop_practices),
    )
)
"""In the order of the table of techniques."""

CATALOGUE: tuple[Technique, ...] = tuple(each for family in FAMILIES for each in family.techniques)


def plain_name(name: str) -> str:
    """A name of a technique or a family, which is given in words or joined by hyphens."""
    return name.lower().replace("-", " ").replace("_", " ").strip()


def technique_named(name: str, key: str | None = None) -> Technique:
    """The technique of a name, in words or joined by hyphens.

    Args:
        key: that gave it, such as `--only`.

    Raises:
        ConfigError: C003 when there is none.
    """
    names = {technique.name: technique for technique in CATALOGUE}
    found = {plain_name(known): technique for known, technique in names.items()}.get(plain_name(name))
    if found is None:
        hint = did_you_mean(name, names) or "ptfast techniques lists them"
        raise ConfigError("C003", "no such technique", key=key or name, value=key and name, suggestion=hint)
    return found
