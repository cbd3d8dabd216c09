"""The JSON Schema of recipe files, which lets editors complete and explain keys, and mark mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pydantic import ConfigDict, create_model
from pydantic.json_schema import GenerateJsonSchema

from ptfast.config.checks.target_checks import own_parameters
from ptfast.config.editors.help import argument_docs, entries
from ptfast.config.files.paths import PRESETS, SEVERAL, groups, options
from ptfast.config.files.yaml_file import lineage
from ptfast.config.schema import Config, section_of
from ptfast.core.errors import PtfastError
from ptfast.core.protocols import TASKS
from ptfast.core.sections.section import GATHERED
from ptfast.core.sections.targets import Target, locate, plain, swallows_keywords
from ptfast.tasks import TaskSection

Schema = dict[str, Any]
_CHOICE = "^(override )?/?{}$"
"""Pattern of a key in a defaults list that chooses an option of a group."""
_REFERENCE = {"type": "string", "pattern": r"\$\{.+\}"}
"""An interpolation such as `${oc.env:HOME}`, allowed in place of any value."""
_ARBITRARY = ConfigDict(arbitrary_types_allowed=True)
_MAPPING = {"type": "object", "required": ["_target_"]}


class _Generator(GenerateJsonSchema):
    """pydantic's generator, adapted to the values that `coerce` accepts."""

    def generate_inner(self, schema: Any) -> Schema:
        found = super().generate_inner(schema)
        if found.get("type") in ("integer", "number", "boolean", "array"):
            return {**found, **_REFERENCE, "type": [found["type"], "string"]}
        return {"anyOf": [found, _REFERENCE]} if found.keys() & {"enum", "const"} else found

    def str_schema(self, schema: Any) -> Schema:
        return {"type": ["string", "number"]}

    def dataclass_schema(self, schema: Any) -> Schema:
        return {"anyOf": [{"type": "string"}, _MAPPING]} if schema["cls"] is Target else {}

    def is_instance_schema(self, schema: Any) -> Schema:
        return _MAPPING

    def callable_schema(self, schema: Any) -> Schema:
        return _MAPPING

    def encode_default(self, dft: Any) -> Any:
        return plain(dft)

    def model_schema(self, schema: Any) -> Schema:
        found = super().model_schema(schema)
        # Fields that gather several keys are not keys themselves.
        found["properties"] = {key: part for key, part in found["properties"].items() if key not in GATHERED}
        return found | {"required": [key for key in found.get("required", ()) if key not in GATHERED]}


def schema() -> Schema:
    """Return the JSON Schema (draft 2020-12) of a recipe: its defaults, and each key's type and range."""
    found = Config.model_json_schema(schema_generator=_Generator)
    properties, rules = found["properties"], list[Schema]()
    for name, field in Config.model_fields.items():
        part = section_of(field.annotation)
        if part is TaskSection:
            properties[name] = _task()
        elif part and "target" in part.model_fields:
            rules.append(_target_section(name, found["$defs"][part.__name__]))
    del properties["recipe"]
    properties |= {"defaults": _defaults(), "hydra": {"type": "object"}}
    properties["preset"]["anyOf"] = _options(PRESETS)
    top = {"$schema": GenerateJsonSchema.schema_dialect, "title": "ptfast recipe"}
    return {**found, **top, "allOf": rules, "required": []}


def _defaults() -> Schema:
    """Return the schema of a defaults list: `optimizer: sgd_cifar`, with or without `override /`."""
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
    """Return the options of a group, each with the summary from its file."""
    return [{"const": entry.name, "description": entry.summary} for entry in entries(group)]


def of_type(annotation: Any) -> Schema:
    """Return the schema of a keyword's type; it is empty for objects that only a target can make."""
    try:
        holder = create_model("Holder", __config__=_ARBITRARY, value=(annotation, ...))
        whole = holder.model_json_schema(schema_generator=_Generator)
    except Exception:  # pydantic may not know another library's annotation
        return {}
    found = {key: part for key, part in whole["properties"]["value"].items() if key != "title"}
    alternatives = found.get("anyOf", [found])
    made_only = all(each in (_MAPPING, {"type": "null"}) for each in alternatives)
    return {} if made_only or whole.get("$defs", {}).keys() - {"Target"} else found


def _keywords(
    functions: Iterable[Callable[..., Any]], section: str, fixed: Iterable[str]
) -> tuple[Schema, Schema]:
    """Return two schemas of targets' keywords: by name only, and typed with no others allowed."""
    loose: Schema = {}
    types: dict[str, list[Schema]] = {}
    for function in functions:
        docs = argument_docs(function)
        for name, parameter in own_parameters(function, section).items():
            types.setdefault(name, []).append(of_type(parameter.annotation))
            described = {"description": docs[name]} if name in docs else {}
            loose[name] = loose.get(name) or described
    closed = {name: {"anyOf": found} for name, found in types.items() if name not in fixed}
    names = sorted({*types, *fixed, "_target_"})
    return loose, {"propertyNames": {"enum": names}, "properties": closed}


def _target_section(group: str, section: Schema) -> Schema:
    """Add keywords to a section; return the rule that forbids others unless the recipe names a target."""
    functions: list[Callable[..., Any]] = []
    open_options: list[str] = []
    """Options whose target takes keywords that its signature does not name."""
    for option, file in options(group).items():
        # The last of an option's files that names a target determines it.
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
    loose, strict = _keywords(functions, group, section["properties"])
    target = {"description": "Import path of a class or function.", "type": ["string", "null"]}
    section["properties"] = {"_target_": target, **loose, **section["properties"]}
    section["additionalProperties"] = True
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
    return {"if": {"not": {"anyOf": [own_target, chosen]}}, "then": closed}


def _task() -> Schema:
    """Return the schema of a task: a name or import path, alone or with keywords."""
    loose, strict = _keywords(map(locate, TASKS.values()), "task", ["name"])
    own = {"type": "string", "pattern": r"\."}
    doc = TaskSection.model_fields["name"].description
    name = {"description": doc, "anyOf": [{"enum": ["auto", *TASKS]}, own, _REFERENCE]}
    section = {
        "type": "object",
        "properties": {**loose, "name": name, "_target_": own},
        "if": {"anyOf": [{"properties": {"name": own}, "required": ["name"]}, {"required": ["_target_"]}]},
        "else": strict,
    }
    return {"description": " ".join((TaskSection.__doc__ or "").split()), "anyOf": [name, section]}
