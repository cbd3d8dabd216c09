"""Types of config values as JSON Schema: what `coerce` takes, as far as a schema can say it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from ptfast.core.durations import NUMBER, Duration, Unit
from ptfast.core.sections.coerce import (
    EMPTY,
    MAPPINGS,
    SEQUENCES,
    Range,
    asked_for,
    is_known,
    is_union,
    strip,
    units_of,
)
from ptfast.core.sections.targets import Target

Schema = dict[str, Any]

REFERENCE: Schema = {
    "type": "string",
    "pattern": r"\$\{.+\}",
    "description": "a reference, such as ${oc.env:HOME}",
}
TARGET: Schema = {"type": "object", "required": ["_target_"]}

_NAMES: dict[Unit, str] = {
    "steps": "steps?",
    "epochs": "epochs?",
    "samples": "samples?",
    "percent": "percent|%",
}
_TIMES = ("days?|d", "hours?|hrs?|h", "minutes?|mins?|m", "seconds?|secs?|s")
_PLAIN = {bool: "boolean", int: "integer", float: "number", Path: "string", type(None): "null", None: "null"}


def json_type(annotation: Any, *, name: str = "", default: Any = EMPTY) -> list[Schema]:
    """The alternatives that a value may be, references among them; arguments as for `coerce`."""
    annotation, bounds = asked_for(annotation, name, default)
    found = _alternatives(annotation, bounds)
    return found if {} in found else [*found, {"$ref": "#/$defs/reference"}]


def _alternatives(annotation: Any, bounds: Range | None) -> list[Schema]:
    annotation, metadata = strip(annotation)
    bounds = next((item for item in metadata if isinstance(item, Range)), bounds)
    origin, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if is_union(annotation):
        return _of_union(arguments, bounds)
    if origin is Literal:
        return [{"enum": list(arguments)}]
    if origin is str:
        return [{"type": ["string", "number"]}]
    if origin is Duration:
        units = units_of(metadata, "steps").allowed
        return [
            {"type": "number", **_limits(bounds or Range(0))},
            {"type": "string", "pattern": _pattern(units)},
        ]
    if origin is Target:
        return [{"type": "string"}, TARGET]
    if origin in SEQUENCES:
        return [{"type": "array", **_items(origin, arguments, bounds)}]
    if origin in MAPPINGS:
        return [{"type": "object"}]
    kind = _PLAIN.get(origin)
    return [{"type": kind, **(_limits(bounds) if kind in ("integer", "number") else {})} if kind else {}]


def _of_union(members: tuple[Any, ...], bounds: Range | None) -> list[Schema]:
    opaque = [member for member in members if not is_known(member) and strip(member)[0] is not Target]
    if all(member in opaque or member is type(None) for member in members):
        return [{}]
    known = [found for member in members if member not in opaque for found in _alternatives(member, bounds)]
    return [*known, TARGET] if opaque else known


def _items(origin: Any, arguments: tuple[Any, ...], bounds: Range | None) -> Schema:
    def item(member: Any) -> Schema:
        return {"anyOf": [*_alternatives(member, bounds), {"$ref": "#/$defs/reference"}]}

    if not arguments:
        return {}
    if origin is tuple and arguments[-1] is not Ellipsis:
        count = len(arguments)
        return {"prefixItems": [item(member) for member in arguments], "minItems": count, "maxItems": count}
    return {"items": item(arguments[0])}


def _limits(bounds: Range | None) -> Schema:
    if bounds is None:
        return {}
    low = {"exclusiveMinimum" if bounds.open_low else "minimum": bounds.low} if bounds.low > -math.inf else {}
    high = (
        {"exclusiveMaximum" if bounds.open_high else "maximum": bounds.high} if bounds.high < math.inf else {}
    )
    return low | high


def _pattern(units: tuple[Unit, ...]) -> str:
    """A regular expression, in JavaScript's grammar, of durations in these units."""
    if units == ("seconds",):
        parts = r"\s*".join(f"(({NUMBER})\\s*({names}))?" for names in _TIMES)
        return rf"^\s*(?=\S)({NUMBER}|{parts})\s*$"
    names = "|".join(_NAMES[unit] for unit in units if unit in _NAMES)
    return rf"^\s*({NUMBER})\s*({names})?\s*$"
