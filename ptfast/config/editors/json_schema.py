"""A JSON Schema of recipe files, with which editors complete keys, explain them and mark mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from ptfast.config.checks.target_keywords import own_parameters
from ptfast.config.editors.help import argument_docs, entries, field_docs
from ptfast.config.files.paths import PRESETS, SEVERAL, groups, options
from ptfast.config.files.yaml_file import lineage
from ptfast.config.schema import Config, entry_of, section_of
from ptfast.core.durations import NUMBER, Duration, Unit
from ptfast.core.errors import PtfastError
from ptfast.core.protocols import TASKS
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
from ptfast.core.sections.section import GATHERED, Section
from ptfast.core.sections.targets import Target, locate, swallows_keywords
from ptfast.tasks import TaskSection

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


@dataclass
class _Keywords:
    """Keywords of the targets that a group's option files name.

    Args:
        types: keyword -> the alternatives that its value may be.
        docs: keyword -> what it means.
        open_options: options whose target takes keywords that its signature does not name.
    """

    types: dict[str, list[Schema]] = field(default_factory=dict)
    docs: dict[str, str] = field(default_factory=dict)
    open_options: list[str] = field(default_factory=list)

    def add(self, function: Callable[..., Any], section: str) -> None:
        docs = argument_docs(function)
        for name, parameter in own_parameters(function, section).items():
            found = self.types.setdefault(name, [])
            given = json_type(parameter.annotation, name=name, default=parameter.default)
            if (section, name) == ("optimizer", "fused"):
                given.append({"const": "auto"})
            found += [each for each in given if each not in found]
            if name in docs:
                self.docs.setdefault(name, docs[name])

    def loose(self) -> Schema:
        """The keywords by name only: what they mean, for a target that may take them otherwise."""
        return {name: {"description": self.docs[name]} if name in self.docs else {} for name in self.types}

    def strict(self, fixed: list[str]) -> Schema:
        """No other keywords, and each of the right type."""
        typed = {name: {"anyOf": found} for name, found in self.types.items() if name not in fixed}
        return {"propertyNames": {"enum": sorted({*self.types, *fixed, "_target_"})}, "properties": typed}


def schema() -> Schema:
    """The JSON Schema (draft 2020-12) of a recipe: its defaults list, and every key with its type and range.

    Sections with `_target_` take the keywords, types and ranges of the targets that their options name; where
    a recipe names a target of its own, its signature alone knows.
    """
    properties: Schema = {"defaults": _defaults(), "preset": _preset(), "hydra": {"type": "object"}}
    rules: list[Schema] = []
    docs = field_docs(Config)
    for name, found in Config.model_fields.items():
        part = section_of(found.annotation)
        if part is TaskSection:
            properties[name] = _task(docs.get(name))
        elif part and "target" in part.model_fields:
            properties[name], rule = _target_section(name, part)
            rules.append(rule)
        elif part:
            fields = _fields(part)
            properties[name] = _described(part.__doc__, {"properties": fields, "additionalProperties": False})
        elif name not in ("recipe", "preset"):
            properties[name] = _field(name, found, docs.get(name))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ptfast recipe",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "allOf": rules,
        "$defs": {"reference": REFERENCE},
    }


def _described(text: str | None, section: Schema) -> Schema:
    return {"description": " ".join((text or "").split()), "type": "object", **section}


def _defaults() -> Schema:
    """The list that chooses options: `optimizer: sgd_cifar`, with or without Hydra's `override /`."""
    choices: Schema = {_choice(group): {"anyOf": _named(group)} for group in groups() if group != PRESETS}
    for group in SEVERAL:
        several = {"type": "array", "items": choices[_choice(group)]}
        choices[_choice(group)] = {"anyOf": [*_named(group), several]}
    choices[r"^(override )?/?hydra/"] = {"type": "string"}
    choice = {
        "type": "object",
        "patternProperties": choices,
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }
    return {
        "description": "Which option of each group the recipe takes, and recipes that it builds on.",
        "type": "array",
        "items": {"anyOf": [choice, {"type": "string"}]},
    }


def _choice(group: str) -> str:
    return f"^(override )?/?{group}$"


def _named(group: str) -> list[Schema]:
    """The options of a group, each with what its file says of it."""
    return [{"const": entry.name, "description": entry.summary} for entry in entries(group)]


def _preset() -> Schema:
    return {"description": field_docs(Config)["preset"], "anyOf": _named(PRESETS)}


def _fields(part: type[Section]) -> Schema:
    docs = field_docs(part)
    return {
        name: _field(name, found, docs.get(name))
        for name, found in part.model_fields.items()
        if name not in GATHERED
    }


def _field(name: str, found: Any, doc: str | None) -> Schema:
    annotation = found.annotation
    for metadata in found.metadata:
        annotation = Annotated[annotation, metadata]
    described: Schema = {"description": doc} if doc else {}
    default = found.get_default(call_default_factory=True)
    if isinstance(default, (bool, int, float, str, Duration)):
        described["default"] = str(default) if isinstance(default, Duration) else default
    entry = entry_of(found.annotation)
    if entry is not None:
        item = {"properties": _fields(entry), "additionalProperties": False}
        required = [key for key, value in entry.model_fields.items() if value.is_required()]
        items = _described(entry.__doc__, {**item, "required": required})
        return {**described, "anyOf": [{"type": "array", "items": items}, {"$ref": "#/$defs/reference"}]}
    return {**described, "anyOf": json_type(annotation, name=name)}


def _target_section(group: str, part: type[Section]) -> tuple[Schema, Schema]:
    """A section with `_target_`, and the rule that closes it where the recipe names no target of its own."""
    fields, keywords = _fields(part), _Keywords()
    for option, file in options(group).items():
        path = _target_of(group, file)
        if path is None:
            continue
        try:
            function = locate(path)
        except PtfastError:
            keywords.open_options.append(option)
            continue
        keywords.add(function, group)
        if swallows_keywords(function):
            keywords.open_options.append(option)
    target = {"description": "Import path of a class or function.", "type": ["string", "null"]}
    section = _described(part.__doc__, {"properties": {"_target_": target, **keywords.loose(), **fields}})
    named = {"properties": {group: {"required": ["_target_"]}}, "required": [group]}
    open_choice = {
        "type": "object",
        "propertyNames": {"pattern": _choice(group)},
        "additionalProperties": {"enum": keywords.open_options or [None]},
        "minProperties": 1,
    }
    inherited = {"type": "string", "not": {"const": "_self_"}}
    chosen = {
        "properties": {"defaults": {"contains": {"anyOf": [open_choice, inherited]}}},
        "required": ["defaults"],
    }
    rule = {
        "if": {"not": {"anyOf": [named, chosen]}},
        "then": {"properties": {group: keywords.strict(list(fields))}},
    }
    return section, rule


def _target_of(group: str, file: Path) -> str | None:
    """The target that an option file names, or the option that it inherits from."""
    named = [content.data["_target_"] for content in lineage(group, file) if "_target_" in content.data]
    return named[-1] if named else None


def _task(doc: str | None) -> Schema:
    """A task by name or import path, alone or with its keywords beside it."""
    keywords = _Keywords()
    for path in TASKS.values():
        keywords.add(locate(path), "task")
    own = {"type": "string", "pattern": r"\."}
    name = {
        "description": field_docs(TaskSection)["name"],
        "anyOf": [{"enum": ["auto", *TASKS]}, own, {"$ref": "#/$defs/reference"}],
    }
    section = {
        "type": "object",
        "properties": {**keywords.loose(), "name": name, "_target_": own},
        "if": {"anyOf": [{"properties": {"name": own}, "required": ["name"]}, {"required": ["_target_"]}]},
        "else": keywords.strict(["name"]),
    }
    return {"description": doc or " ".join((TaskSection.__doc__ or "").split()), "anyOf": [name, section]}
