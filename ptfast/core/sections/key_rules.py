"""Rules across keys, and choices that leave some without effect, as a part states them.

Rules, conditions and panel rows are functions that ask by parameter name for what they read: a section or a
top-level key of the config (`gradients`, `steps`), and `place`, which gives where a dotted key was set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any, NamedTuple

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, PtfastError

Rule = Callable[..., "PtfastError | Iterable[PtfastError] | None"]
Place = Callable[[str], str]


class Unused(NamedTuple):
    """Keys that have an effect under one choice only."""

    keys: tuple[str, ...]
    used: Callable[..., bool]
    """Return True if that choice was made."""
    otherwise: str
    """The choice made instead, after `means nothing`; `{SECTION.KEY}` stands for a value."""
    remedy: str


def call_with(function: Callable[..., Any], facts: Mapping[str, Any]) -> Any:
    """Call `function` with those of `facts` that its parameters name."""
    return function(**{name: facts[name] for name in signature(function).parameters})


def longer_than_run(key: str, length: Duration, epochs: int | None, steps: int | None) -> PtfastError | None:
    """Refuse a part of the run that is longer than all of it."""
    total = {"steps": steps, "epochs": epochs}.get(length.unit)
    if total is None or length.value <= total:
        return None
    return ConfigError("C011", f"longer than the run of {total} {length.unit}", key=key, value=length)
