"""Records, rules and keys without effect, collected from the parts that own them.

A part is the light half of a folder: its section of the config, and beside it any of `TECHNIQUES`, `RULES`,
`MACHINE_RULES` (what a machine lacks; asked where nothing else is wrong), `UNUSED` and `FREE_KEYS` (keys that
may change between a run and its continuation). No torch is loaded.
"""

from __future__ import annotations

from typing import Any

from ptfast import models, optim
from ptfast.core.errors import ConfigError
from ptfast.core.sections.nearest_name import did_you_mean
from ptfast.core.sections.section import Rule, Unused
from ptfast.core.sections.technique import PROMISES, Kind, Need, Technique
from ptfast.data import decoding, loaders, sampling, transforms
from ptfast.optim.parameters import parameter_records
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

__all__ = ["CATALOGUE", "MACHINE_RULES", "PROMISES", "RULES", "UNUSED", "Kind", "Need", "Technique"]

PARTS: tuple[Any, ...] = (
    *(loaders, sampling, decoding, debug, optim, schedule, gradients, parameter_records),
    *(precision, backend, checkpointing, compile, rewrites, transforms, curriculum, ema),
    *(parallel, models, loop_practices),
)
"""In the order of the table of techniques."""


def _collect(name: str) -> tuple[Any, ...]:
    return tuple(item for part in PARTS for item in getattr(part, name, ()))


CATALOGUE: tuple[Technique, ...] = _collect("TECHNIQUES")
RULES: tuple[Rule, ...] = _collect("RULES")
MACHINE_RULES: tuple[Rule, ...] = _collect("MACHINE_RULES")
UNUSED: tuple[Unused, ...] = _collect("UNUSED")
FREE_KEYS: tuple[str, ...] = _collect("FREE_KEYS")


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
