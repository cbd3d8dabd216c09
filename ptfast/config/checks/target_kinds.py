"""Check targets: the kind of class or function, and the keywords of its signature."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from ptfast.config.checks.source_keywords import source_keywords
from ptfast.config.files.paths import builtin_root
from ptfast.core.errors import ConfigError, PtfastError, name_of
from ptfast.core.protocols import HOOKS, LOGGER_METHODS, TASKS, Callback, DataInfo
from ptfast.core.sections.coerce import EMPTY, coerce
from ptfast.core.sections.nearest_name import did_you_mean, nearest
from ptfast.core.sections.targets import (
    METRIC_FACTS,
    Target,
    is_metric_function,
    is_torch_scheduler,
    keywords,
    locate,
    signature,
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
        _check_kind(function, target.path, section)
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


def _check_kind(found: Any, path: str, section: str) -> None:
    """Raise a C009 unless `found` can be called for what the section needs."""
    if isinstance(found, ModuleType):
        raise ConfigError("C009", "is a module, not a class", suggestion=_class_in_reach(found, path))
    if not callable(found):
        raise ConfigError("C009", f"is a value of type {type(found).__name__}, not a class or function")
    if not section:
        return
    if not inspect.isclass(found) and not _is_python_function(found):
        raise ConfigError("C009", f"is a built-in function, not {_WANTED[section]}")
    if (getattr(found, "__module__", None) or "").split(".")[0] in sys.stdlib_module_names:
        raise ConfigError("C009", f"is part of Python's standard library, not {_WANTED[section]}")
    if section == "callbacks" and inspect.isclass(found):
        _check_hooks(found)
    if section == "logger" and inspect.isclass(found):
        _check_logger(found)
    if not _FITS[section](found):
        raise ConfigError("C009", f"is not {_WANTED[section]}")


def _check_hooks(found: type) -> None:
    """Raise a C009 for a method that is named like a hook and never called, or not so."""
    for name in dir(found):
        method = inspect.getattr_static(found, name)
        if not name.startswith("on_") or not inspect.isfunction(method):
            continue
        if name not in HOOKS:
            hint = f"{did_you_mean(_in_our_words(name), HOOKS) or ''} The hooks are {', '.join(HOOKS)}"
            raise ConfigError("C009", f"its method {name} would never be called", suggestion=hint.strip())
        _check_call(method, name, list(inspect.signature(getattr(Callback, name)).parameters)[1:])


def _check_call(method: Callable[..., Any], name: str, takes: Iterable[str]) -> None:
    """Raise a C009 for a method that cannot be called with `self` and what it is given."""
    try:
        inspect.signature(method).bind("self", *takes)
    except TypeError as error:
        called = f"{name}({', '.join(['self', *takes])})"
        raise ConfigError("C009", f"its method {name} cannot be called as {called}: {error}") from error


def _check_logger(found: type) -> None:
    """Raise a C009 for a class that lacks a method of loggers, or has one that is not called so."""
    calls = [f"{name}({', '.join(takes)})" for name, takes in LOGGER_METHODS.items()]
    for name, takes in LOGGER_METHODS.items():
        if not hasattr(found, name):
            hint = f"A logger has {', '.join(calls[:-1])} and {calls[-1]}"
            raise ConfigError("C009", f"is not a logger: it has no method {name}", suggestion=hint)
        method = inspect.getattr_static(found, name)
        if inspect.isfunction(method):
            _check_call(method, name, takes)


def _in_our_words(name: str) -> str:
    """The name of a hook of other frameworks by what it is about, without its moment."""
    for theirs, ours in _OTHER_HOOKS.items():
        if theirs in name:
            return ours
    return name


def _is_python_function(found: Any) -> bool:
    if inspect.ismethod(found):
        return inspect.isclass(found.__self__)
    return inspect.isfunction(found) or isinstance(found, functools.partial)


def _class_in_reach(module: ModuleType, path: str) -> str | None:
    """The class that was meant by the module of the same name: `torch.optim.SGD` for `torch.optim.sgd`."""
    before, _, name = path.rpartition(".")
    around = {"": module, before: sys.modules.get(before)}
    for prefix, place in ((before, around[before]), (path, module)):
        classes = [key for key, value in vars(place or module).items() if inspect.isclass(value)]
        if found := nearest(name, classes):
            return f"Did you mean {prefix}.{found}?"
    return None


def _fits_optimizer(found: Any) -> bool:
    from torch.optim import Optimizer

    return inspect.isclass(found) and issubclass(found, Optimizer) and found is not Optimizer


def _fits_model(found: Any) -> bool:
    from torch import nn

    if inspect.isclass(found):
        return issubclass(found, nn.Module)
    called = signature(found)
    returned = called.return_annotation if called else None
    if returned is inspect.Signature.empty:
        return True
    return not inspect.isclass(returned) or issubclass(returned, nn.Module)


def _fits_data(found: Any) -> bool:
    if not inspect.isclass(found):
        return True
    return any(hasattr(found, name) for name in ("__getitem__", "__iter__", "load")) and not _is_network_part(
        found
    )


def _is_network_part(found: type) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(found, (torch.nn.Module, torch.optim.Optimizer))


def _fits_schedule(found: Any) -> bool:
    if is_torch_scheduler(found):
        _check_schedule(found)
        return True
    return hasattr(found, "factor") if inspect.isclass(found) else bool(keywords(found))


def _check_schedule(found: type) -> None:
    """Raise a C009 for a scheduler of torch's whose rates are no function of the step."""
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    if issubclass(found, ReduceLROnPlateau):
        what = "depends on figures of the run, but a schedule is a function of the step only"
        hint = "Use schedule=multistep or schedule=wsd; stop.patience=5 ends a run that gains no more"
        raise ConfigError("C009", what, suggestion=hint)


def _fits_callback(found: Any) -> bool:
    if not inspect.isclass(found):
        return False
    return issubclass(found, Callback) or any(hasattr(found, name) for name in HOOKS)


def _fits_task(found: Any) -> bool:
    return not inspect.isclass(found) or hasattr(found, "loss") or hasattr(found, "step")


_FITS: dict[str, Callable[[Any], bool]] = {
    "data": _fits_data,
    "model": _fits_model,
    "optimizer": _fits_optimizer,
    "schedule": _fits_schedule,
    "logger": lambda found: True,
    "sampling": lambda found: not inspect.isclass(found) or hasattr(found, "__iter__"),
    "callbacks": _fits_callback,
    "metrics": lambda found: (
        not inspect.isclass(found) or (hasattr(found, "update") and hasattr(found, "compute"))
    ),
    "task": _fits_task,
}
_OTHER_HOOKS = {
    "val": "on_evaluation",
    "test": "on_evaluation",
    "eval": "on_evaluation",
    "batch": "on_step",
    "step": "on_step",
    "optimizer": "on_step",
    "epoch": "on_epoch",
    "save": "on_save",
    "checkpoint": "on_save",
    "begin": "on_start",
    "start": "on_start",
    "end": "on_end",
}
"""Words of other frameworks' hooks, the telling ones first, and our hook of that kind."""
_WANTED = {
    "data": "a data set (a class with __getitem__ or __iter__, or a function that returns one)",
    "model": "a torch.nn.Module, nor a function that returns one",
    "optimizer": "a torch.optim.Optimizer",
    "schedule": "a schedule (a function of the step, a scheduler of torch.optim.lr_scheduler, or a "
    "ptfast.techniques.schedule.lr_schedules.Shape)",
    "logger": "a logger (a class with open, log and close)",
    "sampling": "an order of samples (a function such as order(seed, epoch, num_samples), or a Sampler)",
    "callbacks": "a ptfast.core.protocols.Callback",
    "metrics": "a metric (a class with update and compute, or a function of outputs and targets)",
    "task": "a task (a class with the methods of ptfast.core.protocols.Task)",
}
