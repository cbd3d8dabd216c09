"""A JSON Schema of recipe files, with which editors complete keys, explain them and mark mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pydantic.fields import FieldInfo

from ptfast.config.checks.target_keywords import own_parameters
from ptfast.config.editors.help import argument_docs, entries, field_docs
from ptfast.config.files.paths import PRESETS, SEVERAL, groups, options
from ptfast.config.files.yaml_file import lineage
from ptfast.config.schema import Config, entry_of, section_of
from ptfast.core.durations import Duration
from ptfast.core.errors import PtfastError
from ptfast.core.protocols import TASKS
from ptfast.core.sections.coerce import REFERENCE, json_types
from ptfast.core.sections.section import GATHERED, Section, typed
from ptfast.core.sections.targets import locate, swallows_keywords
from ptfast.tasks import TaskSection

Schema = dict[str, Any]
_CHOICE = "^(override )?/?{}$"
"""Pattern of the key by which a defaults list chooses an option of a group."""


def schema() -> Schema:
    """The JSON Schema (draft 2020-12) of a recipe: its defaults, and every key with its type and range."""
    docs = field_docs(Config)
    preset = {"description": docs["preset"], "anyOf": _options(PRESETS)}
    properties: Schema = {"defaults": _defaults(), "preset": preset, "hydra": {"type": "object"}}
    rules: list[Schema] = []
    for name, found in Config.model_fields.items():
        part = section_of(found.annotation)
        if part is TaskSection:
            properties[name] = _task(docs.get(name))
        elif part and "target" in part.model_fields:
            properties[name], rule = _target_section(name, part)
            rules.append(rule)
        elif name not in ("recipe", "preset"):
            properties[name] = _field(found, docs.get(name))
    reference = {
        "type": "string",
        "pattern": r"\$\{.+\}",
        "description": "a reference, such as ${oc.env:HOME}",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ptfast recipe",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "allOf": rules,
        "$defs": {"reference": reference},
    }


def _section(part: type[Section], **content: Any) -> Schema:
    """A section, by default with its own keys."""
    docs = field_docs(part)
    fields = {
        key: _field(found, docs.get(key)) for key, found in part.model_fields.items() if key not in GATHERED
    }
    description = " ".join((part.__doc__ or "").split())
    return {"description": description, "type": "object", "properties": fields, **content}


def _defaults() -> Schema:
    """The list that chooses options: `optimizer: sgd_cifar`, with or without Hydra's `override /`."""
    choices: Schema = {}
    for group in groups():
        if group != PRESETS:
            single = _options(group)
            several = [{"type": "array", "items": {"anyOf": single}}] if group in SEVERAL else []
            choices[_CHOICE.format(group)] = {"anyOf": [*single, *several]}
    choices[r"^(override )?/?hydra/"] = {"type": "string"}
    one = {"additionalProperties": False, "minProperties": 1, "maxProperties": 1}
    choice = {"type": "object", "patternProperties": choices, **one}
    return {
        "description": "Which option of each group the recipe takes, and recipes that it builds on.",
        "type": "array",
        "items": {"anyOf": [choice, {"type": "string"}]},
    }


def _options(group: str) -> list[Schema]:
    """The options of a group, each with what its file says of it."""
    return [{"const": entry.name, "description": entry.summary} for entry in entries(group)]


def _field(found: FieldInfo, doc: str | None) -> Schema:
    described: Schema = {"description": doc} if doc else {}
    default = found.get_default(call_default_factory=True)
    if isinstance(default, (bool, int, float, str, Duration)):
        described["default"] = str(default) if isinstance(default, Duration) else default
    if part := section_of(found.annotation):
        return _section(part, additionalProperties=False)
    entry = entry_of(found.annotation)
    if entry is None:
        return {**described, "anyOf": json_types(typed(found))}
    required = [key for key, value in entry.model_fields.items() if value.is_required()]
    item = _section(entry, additionalProperties=False, required=required)
    return {**described, "anyOf": [{"type": "array", "items": item}, REFERENCE]}


def _keywords(
    functions: Iterable[Callable[..., Any]], section: str, fixed: Iterable[str]
) -> tuple[Schema, Schema]:
    """The keywords of targets by name only, for one that takes them otherwise; then typed, and no others."""
    loose: Schema = {}
    types: dict[str, list[Schema]] = {}
    for function in functions:
        docs = argument_docs(function)
        for name, parameter in own_parameters(function, section).items():
            found = types.setdefault(name, [])
            found += [each for each in json_types(parameter.annotation) if each not in found]
            described = {"description": docs[name]} if name in docs else {}
            loose[name] = loose.get(name) or described
    closed = {name: {"anyOf": found} for name, found in types.items() if name not in fixed}
    names = sorted({*types, *fixed, "_target_"})
    return loose, {"propertyNames": {"enum": names}, "properties": closed}


def _target_section(group: str, part: type[Section]) -> tuple[Schema, Schema]:
    """A section with `_target_`, and the rule that closes it where the recipe names no target of its own."""
    functions: list[Callable[..., Any]] = []
    open_options: list[str] = []
    """Options whose target takes keywords that its signature does not name."""
    for option, file in options(group).items():
        # The last file of those that the option is made of says what its target is.
        named = [content.data["_target_"] for content in lineage(group, file) if "_target_" in content.data]
        if not named or named[-1] is None:
            continue
        try:
            function = locate(named[-1])
        except PtfastError:
            open_options.append(option)
            continue
        functions.append(function)
        if swallows_keywords(function):
            open_options.append(option)
    section = _section(part)
    loose, strict = _keywords(functions, group, section["properties"])
    target = {"description": "Import path of a class or function.", "type": ["string", "null"]}
    section["properties"] = {"_target_": target, **loose, **section["properties"]}
    own_target = {"properties": {group: {"required": ["_target_"]}}, "required": [group]}
    open_choice = {
        "type": "object",
        "propertyNames": {"pattern": _CHOICE.format(group)},
        "additionalProperties": {"enum": open_options or [None]},
        "minProperties": 1,
    }
    inherited = {"type": "string", "not": {"const": "_self_"}}
    chosen = {
        "properties": {"defaults": {"contains": {"anyOf": [open_choice, inherited]}}},
        "required": ["defaults"],
    }
    closed = {"properties": {group: strict}}
    return section, {"if": {"not": {"anyOf": [own_target, chosen]}}, "then": closed}


def _task(doc: str | None) -> Schema:
    """A task by name or import path, alone or with its keywords beside it."""
    loose, strict = _keywords(map(locate, TASKS.values()), "task", ["name"])
    own = {"type": "string", "pattern": r"\."}
    name = {
        "description": field_docs(TaskSection)["name"],
        "anyOf": [{"enum": ["auto", *TASKS]}, own, REFERENCE],
    }
    section = {
        "type": "object",
        "properties": {**loose, "name": name, "_target_": own},
        "if": {"anyOf": [{"properties": {"name": own}, "required": ["name"]}, {"required": ["_target_"]}]},
        "else": strict,
    }
    return {"description": doc or " ".join((TaskSection.__doc__ or "").split()), "anyOf": [name, section]}
