"""A JSON Schema of recipe files, with which editors complete keys and mark mistakes while one types."""

from __future__ import annotations

import math
import types
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from ptfast.config.coerce import Range
from ptfast.config.paths import PRESETS, groups, options
from ptfast.config.schema import Config, Section, Task, section_of
from ptfast.config.targets import Target
from ptfast.config.yaml_file import read_yaml
from ptfast.durations import Duration

_REFERENCE = {
    "type": "string",
    "pattern": r"^\$\{.+\}$",
    "description": "a reference, such as ${oc.env:HOME}",
}
_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "null",
    list: "array",
    dict: "object",
}


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a recipe: its defaults list, and every key with its type and range.

    Sections with `_target_` list the keywords that the option files use and accept others, which only the
    target's signature knows.
    """
    known = [group for group in groups() if group != PRESETS]
    properties = {
        name: _section(name, part) if (part := section_of(field.annotation)) else _field(field)
        for name, field in Config.model_fields.items()
        if name not in ("recipe", "preset")
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ptfast recipe",
        "type": "object",
        "properties": {"defaults": _defaults(known), **properties},
        "additionalProperties": False,
        "$defs": {"reference": _REFERENCE},
    }


def _defaults(known: list[str]) -> dict[str, Any]:
    """The list that chooses options: `- override /optimizer: sgd_cifar`."""
    choices = {f"override /{group}": {"enum": list(options(group))} for group in known}
    choice = {"type": "object", "properties": choices, "additionalProperties": False, "maxProperties": 1}
    return {
        "description": "which option of each group the recipe takes",
        "type": "array",
        "items": {"anyOf": [choice, {"type": "string"}]},
    }


def _section(name: str, annotation: type[Section]) -> dict[str, Any]:
    fields = {
        key: _field(field)
        for key, field in annotation.model_fields.items()
        if key not in ("target", "options")
    }
    if annotation is Task:
        # The tasks themselves know their other keywords.
        named = {"type": "object", "properties": {"name": fields["name"]}}
        return {"anyOf": [*fields["name"]["anyOf"], named], "default": fields["name"]["default"]}
    if "target" not in annotation.model_fields:
        return {"type": "object", "properties": fields, "additionalProperties": False}
    target = {"type": ["string", "null"], "description": "import path of a class or function"}
    keywords = {key: found for key, found in _keywords(name).items() if key not in fields}
    return {"type": "object", "properties": {"_target_": target, **fields, **keywords}}


def _keywords(group: str) -> dict[str, Any]:
    """Keywords that the option files of a group set, each with the types of its values."""
    seen: dict[str, set[str]] = {}
    for file in options(group).values():
        for key, value in _values(file).items():
            seen.setdefault(key, set()).add(_TYPES.get(type(value), "string"))
    return {key: {"type": _loosened(kinds)} for key, kinds in sorted(seen.items())}


def _values(file: Path) -> dict[str, Any]:
    values = read_yaml(file).data
    return {key: value for key, value in values.items() if key not in ("defaults", "_target_")}


def _loosened(kinds: set[str]) -> list[str]:
    """The types of the examples, and what else fits: text for references, any number for a number."""
    more = {"string", "null"} | ({"number"} if "integer" in kinds else set())
    return sorted(kinds | more)


def _field(field: Any) -> dict[str, Any]:
    annotation = field.annotation
    for metadata in field.metadata:
        annotation = Annotated[annotation, metadata]
    found: dict[str, Any] = {"anyOf": [*_alternatives(annotation), {"$ref": "#/$defs/reference"}]}
    default = field.get_default(call_default_factory=True)
    if isinstance(default, (bool, int, float, str)):
        found["default"] = default
    elif isinstance(default, Duration):
        found["default"] = str(default)
    return found


def _alternatives(annotation: Any) -> list[dict[str, Any]]:
    """The JSON types that an annotation accepts."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = next((item for item in arguments[1:] if isinstance(item, Range)), None)
        return list(map(partial(_bounded, bounds=bounds), _alternatives(arguments[0])))
    if origin in (Union, types.UnionType):
        return [alternative for member in arguments for alternative in _alternatives(member)]
    if origin is Literal:
        return [{"enum": list(arguments)}]
    if origin is list:
        return [{"type": "array", "items": {"anyOf": _alternatives(arguments[0])}}]
    if annotation is Duration:
        return [{"type": "number"}, {"type": "string", "pattern": r"^[0-9.]"}]
    if annotation is Target:
        return [{"type": "string"}, {"type": "object", "required": ["_target_"]}]
    return [{"type": _TYPES[annotation]}]


def _bounded(alternative: dict[str, Any], bounds: Range | None) -> dict[str, Any]:
    if bounds is None or alternative.get("type") not in ("integer", "number"):
        return alternative
    low = {"exclusiveMinimum" if bounds.open_low else "minimum": bounds.low} if bounds.low > -math.inf else {}
    high = (
        {"exclusiveMaximum" if bounds.open_high else "maximum": bounds.high} if bounds.high < math.inf else {}
    )
    return {**alternative, **low, **high}
