"""The base of all sections of a config, and the types that many of them use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, PtfastError
from ptfast.core.sections.coerce import AT_LEAST_ONE, POSITIVE, InUnit, Range, coerce
from ptfast.core.sections.targets import Target

Count = Annotated[int, AT_LEAST_ONE]

OrAuto = Literal["auto"]

Part = Annotated[float, Range(0, 1, open_low=True)]

Ratio = Annotated[float, POSITIVE]

Every = Annotated[Duration, InUnit("epochs"), POSITIVE]

WallTime = Annotated[Duration, InUnit("seconds", ("seconds",)), POSITIVE]


GATHERED = ("target", "options", "several")
"""Fields of sections that hold what is gathered from the keys of a config, and are no keys themselves."""


class Section(BaseModel):
    """Base of all sections: frozen, closed, values coerced by `coerce` before pydantic sees them."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _coerced(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        annotation = field.annotation
        for metadata in field.metadata:
            annotation = Annotated[annotation, metadata]  # type: ignore[valid-type]
        try:
            return coerce(value, annotation, name=info.field_name or "")
        except PtfastError as error:
            raise ValueError(str(error)) from error  # which pydantic gathers


class TargetSection(Section):
    """A section with `_target_`: the target's keywords and fixed keys side by side."""

    target: Target


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

    @classmethod
    def unless(cls, choice: str, values: tuple[str, ...], *keys: str) -> Unused:
        """Keys that count where `choice`, such as `debug.mode`, has one of `values`, the usual one first."""
        section, _, name = choice.partition(".")
        # What an option of the group sets is shown as that option: `debug=profiler`.
        shown = section if name in ("mode", "strategy", "kind") else choice
        return cls(
            keys,
            lambda **sections: getattr(sections[section], name) in values,
            f"to {shown}={{{choice}}}",
            f"{shown}={values[0]}",
        )


def call_with(function: Callable[..., Any], facts: Mapping[str, Any]) -> Any:
    """Call `function` with those of `facts` that its parameters name; with all where it takes any."""
    parameters = signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function(**facts)
    return function(**{name: facts[name] for name in parameters})


def longer_than_run(key: str, length: Duration, epochs: int | None, steps: int | None) -> PtfastError | None:
    """Refuse a part of the run that is longer than all of it."""
    total = {"steps": steps, "epochs": epochs}.get(length.unit)
    if total is None or length.value <= total:
        return None
    return ConfigError("C011", f"longer than the run of {total} {length.unit}", key=key, value=length)
