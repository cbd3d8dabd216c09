"""Check targets against their signature, or only their keywords against their source, which is quick."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from ptfast.config.checks.target_kinds import check_kind
from ptfast.config.files.paths import builtin_root
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, PtfastError, did_you_mean, name_of
from ptfast.core.protocols import TASKS, DataInfo
from ptfast.core.sections.coerce import AT_LEAST_ONE, FRACTION, NOT_NEGATIVE, POSITIVE, InUnit, coerce
from ptfast.core.sections.targets import (
    EMPTY,
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
_FACTS: dict[str, frozenset[str]] = {
    "model": frozenset({*(field.name for field in dataclasses.fields(DataInfo)), "pretrained"}),
    "sampling": _OF_SAMPLES,
    "metrics": METRIC_FACTS,
}
"""Keywords that ptfast gives by itself."""
_LIBRARIES = ("torch.", "torchvision.", "timm.", "transformers.", "schedulefree.")
_RANGES = {
    **dict.fromkeys(("lr", "max_lr", "base_lr", "eps"), POSITIVE),
    **dict.fromkeys(("weight_decay", "lr_decay", "eta_min"), NOT_NEGATIVE),
    **dict.fromkeys(("momentum", "betas", "alpha", "label_smoothing", "dropout"), FRACTION),
    **dict.fromkeys(("attention_dropout", "drop_rate", "drop_path_rate", "stochastic_depth_prob"), FRACTION),
    **dict.fromkeys(("width", "depth", "hidden_size", "num_layers", "num_heads"), AT_LEAST_ONE),
}
"""Ranges of keywords in these libraries. A class of ours, or of a user, has them in its signature."""
_TYPES: dict[type, Any] = {
    bool: bool | None,
    float: float | list[float],
    int: int | float | list[int | float],
    Duration: Duration,
}
"""The type that the default of a keyword without an annotation stands for; a bool is an int, too."""
_PASSING_ON = (*_LIBRARIES, "ptfast.models.")
"""Packages whose functions pass keywords that they do not name on to these libraries."""


def check_target(
    target: Target,
    section: str,
    *,
    fixed: Iterable[str] = (),
    locate: Locate = locate,
    prefix: str | None = None,
    by_source: bool = False,
) -> tuple[Target, list[PtfastError]]:
    """Check what kind of thing a target is, its keywords and their values.

    Args:
        section: one of `SECTIONS`, `callbacks`, `task`, or `` for a target inside another's keywords.
        fixed: keys of the section that are not the target's, for suggestions.
        prefix: the key that messages start with, by default the section.
        by_source: look only for unknown keywords of built-in targets, and import nothing.
    """
    prefix = section if prefix is None else prefix
    if by_source:
        is_built_in = target.path in built_in_targets(section)
        known = source_keywords(target.path, section) if is_built_in else None
        strange = [] if known is None else [name for name in target.kwargs if name not in known]
        return target, _unknown(target, strange, section, prefix, [*(known or ()), *fixed])
    try:
        function = locate(target.path)
        check_kind(function, target.path, section)
    except PtfastError as problem:
        return target, [problem.at(f"{prefix}._target_", target.path)]
    parameters = own_parameters(function, section, target.kwargs)
    strange = [name for name in target.kwargs if name not in parameters]
    strange = [] if swallows_keywords(function) else strange
    kwargs: dict[str, Any] = {}
    problems: list[PtfastError] = []
    for name, given in target.kwargs.items():
        key, parameter = f"{prefix}.{name}", parameters.get(name)
        value, nested = _check_nested(given, key, section if section == "metrics" else "", locate)
        problems += nested
        if name in strange:
            problems += _unknown(target, [name], section, prefix, [*parameters, *fixed])
            continue
        try:
            if parameter:
                # A bare number for a duration has the unit of the default.
                default = parameter.default
                default = default[0] if isinstance(default, (list, tuple)) and default else default
                unit = default.unit if isinstance(default, Duration) else "epochs"
                in_unit = InUnit(unit, ("seconds",)) if unit == "seconds" else InUnit(unit)
                kwargs[name] = coerce(value, parameter.annotation, in_unit)
            else:
                passed_on = name in _RANGES and name_of(function).startswith(_PASSING_ON)
                kwargs[name] = coerce(value, Annotated[Any, _RANGES[name]] if passed_on else Any)
        except PtfastError as problem:
            problems.append(problem.at(key, value))
    if not target.partial:
        given_or_known = {*target.kwargs, *_FACTS.get(section, ())}
        problems += [
            ConfigError("C016", f"required by {target.path}, but not set", key=f"{prefix}.{name}")
            for name, parameter in parameters.items()
            if parameter.default is EMPTY and name not in given_or_known
        ]
    return dataclasses.replace(target, kwargs=kwargs), problems


def _check_nested(value: Any, key: str, section: str, locate: Locate) -> tuple[Any, list[PtfastError]]:
    if isinstance(value, Target):
        return check_target(value, section, locate=locate, prefix=key)
    if not isinstance(value, (dict, list)):
        return value, []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    checked = {name: _check_nested(item, f"{key}.{name}", section, locate) for name, item in items}
    problems = [problem for _, found in checked.values() for problem in found]
    parts = {name: part for name, (part, _) in checked.items()}
    return parts if isinstance(value, dict) else [*parts.values()], problems


def _unknown(
    target: Target, names: Iterable[str], section: str, prefix: str, known: list[str]
) -> list[PtfastError]:
    errors: list[PtfastError] = []
    for name in names:
        value = target.kwargs[name]
        if (section, name, value) == ("optimizer", "fused", "auto"):
            continue  # an option file may say so for any optimizer: on where there is such a thing
        hint = did_you_mean(name, known, f"{prefix}.{{}}")
        hint = hint or (f"It takes {', '.join(known[:12])}" if known else "It takes no keywords")
        errors.append(
            ConfigError("C002", "unknown key", key=f"{prefix}.{name}", value=value, suggestion=hint)
        )
    return errors


def own_parameters(function: Any, section: str, given: Iterable[str] = ()) -> dict[str, inspect.Parameter]:
    """The keywords that a config may set, each annotated with the type and the range of its values.

    What ptfast passes itself is left out: parameters, outputs and targets, the length of the run.
    """
    parameters = keywords(function)
    is_class = inspect.isclass(function)
    if is_torch_scheduler(function):
        parameters.pop("optimizer", None)
    elif section in ("optimizer", "task") or (section == "schedule" and not is_class):
        parameters = dict([*parameters.items()][1:])
        if section == "schedule":
            parameters.pop("num_steps", None)
    elif section == "metrics" and is_metric_function(function, tuple(given)):
        parameters = dict([*parameters.items()][2:])
    elif section == "sampling" and not is_class:
        parameters = {name: found for name, found in parameters.items() if name not in _OF_SAMPLES}
    ranges = _RANGES if name_of(function).startswith(_LIBRARIES) else {}
    for name, parameter in parameters.items():
        annotation, default = parameter.annotation, parameter.default
        if annotation is EMPTY or annotation is Any:
            annotation = next((wanted for kind, wanted in _TYPES.items() if isinstance(default, kind)), Any)
        # A default outside the range says that this library means something else by the name.
        if (bounds := ranges.get(name)) and bounds.holds(default):
            annotation = Annotated[annotation, bounds]
        if (section, name) == ("optimizer", "fused"):
            annotation = Literal["auto"] | annotation
        parameters[name] = parameter.replace(annotation=annotation)
    return parameters


def built_in_targets(section: str) -> dict[str, list[str]]:
    """The targets that a section's shipped options name, each with those options."""
    if section == "task":
        return {path: [name] for name, path in TASKS.items()}
    targets: dict[str, list[str]] = {}
    for file in sorted((builtin_root().conf / section).glob("*.yaml")) if section else ():
        for path in re.findall(r"(?m)^_target_: ([\w.]+\.\w+)$", file.read_text("utf-8")):
            targets.setdefault(path, []).append(file.stem)
    return targets


def source_keywords(path: str, section: str) -> list[str] | None:
    """The `own_parameters` of a built-in target, by its source alone; None where only an import can tell."""
    names = _source_names(path)
    if names is None:
        return None
    names = names[1:] if section in ("optimizer", "task") else names
    return [name for name in names if section != "sampling" or name not in _OF_SAMPLES]


def _source_names(path: str) -> list[str] | None:
    module, _, name = path.rpartition(".")
    package, *parts = module.split(".")
    # To find what lies below a package imports it: the file is looked for beside the top-level one.
    spec = find_spec(package) if package else None
    if spec is None or not spec.submodule_search_locations:
        return None
    place = Path(spec.submodule_search_locations[0], *parts)
    candidates = (place.with_name(f"{place.name}.py"), place / "__init__.py")
    file = next((file for file in candidates if file.is_file()), None)
    for node in reversed(_parsed(file, file.stat().st_mtime_ns).body) if file else ():
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return _names_of(node, module)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return _source_names(f"{node.module}.{alias.name}")
    return None


@functools.lru_cache
def _parsed(file: Path, changed_ns: int) -> ast.Module:
    return ast.parse(file.read_bytes())


def _names_of(node: ast.ClassDef | ast.FunctionDef, module: str) -> list[str] | None:
    """The keywords of a function, or of a class's constructor: its own or that of its one base class."""
    if isinstance(node, ast.FunctionDef):
        return None if node.args.kwarg else [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]
    for part in reversed(node.body):
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            names = _names_of(part, module)
            return names and names[1:]
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    if len(bases) != len(node.bases) or len(bases) > 1:
        return None
    inherited = _source_names(f"{module}.{bases[0]}") if bases else []
    if inherited is None or not any("dataclass" in ast.unparse(each) for each in node.decorator_list):
        return inherited
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
    own = [ast.unparse(field.target) for field in fields if "ClassVar" not in ast.unparse(field.annotation)]
    return list(dict.fromkeys([*inherited, *own]))
