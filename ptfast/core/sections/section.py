"""The base of all sections of a config, and the types that many of them use."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from ptfast.core.durations import Duration
from ptfast.core.errors import PtfastError
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
