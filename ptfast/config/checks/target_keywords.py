"""Check the keywords of targets: by their signature, and before that by their source, which is quick."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ptfast.config.checks.target_kinds import check_kind
from ptfast.config.files.paths import builtin_root
from ptfast.core.errors import ConfigError, PtfastError, did_you_mean, name_of
from ptfast.core.protocols import TASKS, DataInfo
from ptfast.core.sections.coerce import EMPTY, coerce
from ptfast.core.sections.targets import (
    METRIC_FACTS,
    Target,
    is_metric_function,
    is_torch_scheduler,
    keywords,
    locate,
    swallows_keywords,
)

Locate = Callable[[str], Any]
SECTIONS = ("data", "model", "sampling", "optimizer", "schedule", "logger")
_OF_SAMPLES = frozenset({"seed", "epoch", "num_samples", "labels", "weights", "data_source"})
"""What an order of samples is called with, by name."""
_DATA_FACTS = frozenset(field.name for field in dataclasses.fields(DataInfo))
_MODEL_SWITCHES = frozenset({"pretrained"})


KNOWN_NAMES = ("ptfast.", "torch.", "torchvision.", "timm.", "transformers.", "schedulefree.")
"""Packages whose keywords of a common name, such as `lr`, have the range of that name."""


def check_target(
    target: Target,
    section: str,
    *,
    fixed: Iterable[str] = (),
    locate: Locate = locate,
    prefix: str | None = None,
) -> tuple[Target, list[PtfastError]]:
    """Check a target against its section and its own signature.

    Args:
        target: as given, its values uncoerced.
        section: one of `SECTIONS`, `callbacks`, `task`, or `` for a target inside another's keywords.
        fixed: keys of the section that are not the target's, for suggestions.
        locate: how import paths are resolved; `Trust.locate` for a config from elsewhere.
        prefix: the key that messages start with, by default the section.
    """
    prefix = section if prefix is None else prefix
    try:
        function = locate(target.path)
        check_kind(function, target.path, section)
    except PtfastError as problem:
        return target, [problem.at(f"{prefix}._target_", target.path)]
    parameters = own_parameters(function, section, target.kwargs)
    open_ended = swallows_keywords(function)
    kwargs: dict[str, Any] = {}
    problems: list[PtfastError] = []
    # What a word means is known of these packages alone: `alpha` of a user's own loss may be anything.
    known = name_of(function).startswith(KNOWN_NAMES)
    for name, value in target.kwargs.items():
        key = f"{prefix}.{name}"
        value, nested = _check_nested(value, key, locate, section if section == "metrics" else "")
        problems += nested
        if name not in parameters and not open_ended:
            problems += _unknown(name, value, section, prefix, [*parameters, *fixed])
            continue
        try:
            kwargs[name] = _coerced(name, value, parameters.get(name), section, known)
        except PtfastError as problem:
            problems.append(problem.at(key, value))
    if not target.partial:
        problems += _missing(parameters, kwargs, target, section, prefix)
    return dataclasses.replace(target, kwargs=kwargs), problems


def check_source(
    target: Target,
    section: str,
    *,
    fixed: Iterable[str] = (),
    locate: Locate = locate,
    prefix: str | None = None,
) -> tuple[Target, list[PtfastError]]:
    """Report unknown keys of built-in targets, as `check_target` would, by their source; import nothing."""
    known = source_keywords(target.path) if target.path in built_in_targets(section) else None
    if known is None:
        return target, []
    known = known[1:] if section in ("optimizer", "task") else known
    known = [name for name in known if name not in _OF_SAMPLES] if section == "sampling" else known
    prefix = section if prefix is None else prefix
    strange = {name: value for name, value in target.kwargs.items() if name not in known}
    found = [_unknown(name, value, section, prefix, [*known, *fixed]) for name, value in strange.items()]
    return target, [problem for problems in found for problem in problems]


def built_in_targets(section: str) -> dict[str, list[str]]:
    """The targets of the shipped options of a section, each with the options whose own file names it."""
    if section == "task":
        return {path: [name] for name, path in TASKS.items()}
    targets: dict[str, list[str]] = {}
    for file in sorted((builtin_root().conf / section).glob("*.yaml")) if section else ():
        for path in re.findall(r"(?m)^_target_: ([\w.]+\.\w+)$", file.read_text("utf-8")):
            targets.setdefault(path, []).append(file.stem)
    return targets


def own_parameters(function: Any, section: str, given: Iterable[str] = ()) -> dict[str, inspect.Parameter]:
    """The keywords that a config may set: not the first one of those that are given parameters or facts."""
    parameters = keywords(function)
    if is_torch_scheduler(function):
        parameters.pop("optimizer", None)
    elif section in ("optimizer", "task") or (section == "schedule" and not inspect.isclass(function)):
        if parameters:
            parameters.pop(next(iter(parameters)))
        if section == "schedule":
            parameters.pop("num_steps", None)
    elif section == "metrics" and is_metric_function(function, tuple(given)):
        parameters = dict(list(parameters.items())[2:])
    elif section == "sampling" and not inspect.isclass(function):
        parameters = {name: found for name, found in parameters.items() if name not in _OF_SAMPLES}
    return parameters


def _coerced(name: str, value: Any, parameter: inspect.Parameter | None, section: str, known: bool) -> Any:
    """A value as its annotation asks for, or as its name does where that has one meaning."""
    if section == "optimizer" and name == "fused" and value == "auto":
        return value
    name = name if known else ""
    if parameter is None:
        return coerce(value, name=name)
    return coerce(value, parameter.annotation, name=name, default=parameter.default, unit="epochs")


def _missing(
    parameters: dict[str, inspect.Parameter],
    kwargs: dict[str, Any],
    target: Target,
    section: str,
    prefix: str,
) -> list[PtfastError]:
    facts = {"model": _DATA_FACTS | _MODEL_SWITCHES, "sampling": _OF_SAMPLES, "metrics": METRIC_FACTS}
    supplied = facts.get(section, frozenset())
    return [
        ConfigError("C016", f"required by {target.path}, but not set", key=f"{prefix}.{name}")
        for name, parameter in parameters.items()
        if parameter.default is EMPTY
        and name not in kwargs
        and name not in target.kwargs
        and name not in supplied
    ]


def _check_nested(value: Any, key: str, locate: Locate, section: str) -> tuple[Any, list[PtfastError]]:
    """Check the targets inside a keyword's value."""
    if isinstance(value, Target):
        return check_target(value, section, locate=locate, prefix=key)
    if isinstance(value, dict):
        checked = {
            name: _check_nested(item, f"{key}.{name}", locate, section) for name, item in value.items()
        }
        return {name: item for name, (item, _) in checked.items()}, [
            p for _, found in checked.values() for p in found
        ]
    if isinstance(value, list):
        checked = [_check_nested(item, f"{key}.{index}", locate, section) for index, item in enumerate(value)]
        return [item for item, _ in checked], [problem for _, found in checked for problem in found]
    return value, []


def _unknown(name: str, value: Any, section: str, prefix: str, known: list[str]) -> list[PtfastError]:
    if section == "optimizer" and name == "fused" and value == "auto":
        return []  # an option file may say so for any optimizer: on where there is such a thing
    hint = did_you_mean(name, known, f"{prefix}.{{}}")
    if hint is None:
        hint = f"It takes {', '.join(known[:12])}" if known else "It takes no keywords"
    return [ConfigError("C002", "unknown key", key=f"{prefix}.{name}", value=value, suggestion=hint)]


_Function = ast.FunctionDef | ast.AsyncFunctionDef


def source_keywords(path: str) -> list[str] | None:
    """Return the names of the parameters of `path` that can be given by name; import nothing.

    Follows imports from one file to the next, base classes, and the fields of dataclasses.

    Args:
        path: import path of a class or function.

    Returns:
        The names in their order, or None where only an import can tell, as for `**kwargs`.
    """
    module, _, name = path.rpartition(".")
    file = _file(module)
    if file is None:
        return None
    tree = ast.parse(file.read_bytes())
    for node in reversed(tree.body):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _of_class(node, module)
        if isinstance(node, _Function) and node.name == name:
            return _of_function(node)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return source_keywords(f"{node.module}.{alias.name}")
    return None


def _file(module: str) -> Path | None:
    """The file of a module, beside its top-level package: to find what lies below a package imports it."""
    package, *parts = module.split(".")
    spec = find_spec(package) if package else None
    if spec is None or not spec.submodule_search_locations:
        return None
    place = Path(spec.submodule_search_locations[0], *parts)
    candidates = (place.with_name(f"{place.name}.py"), place / "__init__.py")
    return next((file for file in candidates if file.is_file()), None)


def _of_class(node: ast.ClassDef, module: str) -> list[str] | None:
    """The keywords of a class's constructor, its own or that of the one class it is derived from."""
    for part in reversed(node.body):
        if isinstance(part, _Function) and part.name == "__init__":
            names = _of_function(part)
            return names and names[1:]
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    if len(bases) != len(node.bases) or len(bases) > 1:
        return None
    inherited = source_keywords(f"{module}.{bases[0]}") if bases else []
    if inherited is None or not any("dataclass" in ast.unparse(each) for each in node.decorator_list):
        return inherited
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
    own = [ast.unparse(field.target) for field in fields if "ClassVar" not in ast.unparse(field.annotation)]
    return list(dict.fromkeys([*inherited, *own]))


def _of_function(node: _Function) -> list[str] | None:
    return None if node.args.kwarg else [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]
