"""Check a target: its kind, its keywords and their values."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Annotated, Any, Literal

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, PtfastError, did_you_mean
from ptfast.core.protocols import HOOKS, LOGGER_METHODS, Callback, DataInfo
from ptfast.core.sections.coerce import AT_LEAST_ONE, FRACTION, NOT_NEGATIVE, POSITIVE, InUnit, coerce
from ptfast.core.sections.origins import LIBRARIES, comes_from
from ptfast.core.sections.spelling import nearest
from ptfast.core.sections.targets import (
    EMPTY,
    METRIC_FACTS,
    Target,
    is_metric_function,
    is_torch_scheduler,
    keywords,
    locate,
    signature,
    steps_on_metric,
    swallows_keywords,
)

Locate = Callable[[str], Any]
SECTIONS = ("data", "model", "sampling", "optimizer", "schedule", "logger")
_OF_SAMPLES = frozenset({"seed", "epoch", "num_samples", "labels", "weights", "data_source"})
"""Keyword arguments that an order of samples is called with."""
_FACTS: dict[str, frozenset[str]] = {
    "model": frozenset({*(field.name for field in dataclasses.fields(DataInfo)), "pretrained"}),
    "sampling": _OF_SAMPLES,
    "metrics": METRIC_FACTS,
}
"""Keywords that ptfast passes itself."""
_OF_OWN_DATA = {
    "image_size": inspect.Parameter(
        "image_size", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[int, AT_LEAST_ONE]
    )
}
"""Keywords that may be set for any user's dataset, and are passed only if it takes them."""
_RANGES = {
    **dict.fromkeys(("lr", "max_lr", "base_lr", "eps"), POSITIVE),
    **dict.fromkeys(("weight_decay", "lr_decay", "eta_min"), NOT_NEGATIVE),
    **dict.fromkeys(("momentum", "betas", "alpha", "label_smoothing", "dropout"), FRACTION),
    **dict.fromkeys(("attention_dropout", "drop_rate", "drop_path_rate", "stochastic_depth_prob"), FRACTION),
    **dict.fromkeys(("width", "depth", "hidden_size", "num_layers", "num_heads"), AT_LEAST_ONE),
}
"""Ranges of keywords in `LIBRARIES`; classes of ptfast or of users have them in their signatures."""
_TYPES: dict[type, Any] = {
    bool: bool | None,
    float: float | list[float],
    int: int | float | list[int | float],
    Duration: Duration,
}
"""Types of keywords without an annotation, by their default; bool comes first because it is an int."""
_PASSING_ON = (*LIBRARIES, "ptfast.models")
"""Packages whose functions forward keywords they do not name to these libraries."""


def check_target(
    target: Target,
    section: str,
    *,
    fixed: Iterable[str] = (),
    locate: Locate = locate,
    prefix: str | None = None,
) -> tuple[Target, list[PtfastError]]:
    """Check a target's kind, its keywords and their values.

    Args:
        section: one of `SECTIONS`, `callbacks`, `task`, or `` for a target inside another's keywords.
        fixed: keys of the section that are not the target's, for suggestions.
        prefix: the key that messages start with, by default the section.
    """
    prefix = section if prefix is None else prefix
    try:
        function = locate(target.path)
        check_kind(function, target.path, section)
    except PtfastError as problem:
        return target, [problem.at(f"{prefix}._target_", target.path)]
    parameters = own_parameters(function, section, target.kwargs)
    if section == "data" and not hasattr(function, "load"):
        parameters = {**_OF_OWN_DATA, **parameters}
    strange = [name for name in target.kwargs if name not in parameters]
    strange = [] if swallows_keywords(function) else strange
    kwargs: dict[str, Any] = {}
    problems: list[PtfastError] = []
    for name, given in target.kwargs.items():
        key, parameter = f"{prefix}.{name}", parameters.get(name)
        value, nested = _check_nested(given, key, section if section == "metrics" else "", locate)
        problems += nested
        if name in strange:
            problems += _unknown(target, name, section, key, [*parameters, *fixed])
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
                passed_on = name in _RANGES and comes_from(function, *_PASSING_ON)
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


def _unknown(target: Target, name: str, section: str, key: str, known: list[str]) -> list[PtfastError]:
    value = target.kwargs[name]
    if (section, name, value) == ("optimizer", "fused", "auto"):
        return []  # option files may set it for any optimizer: used only where supported
    hint = did_you_mean(name, known, f"{key.removesuffix(name)}{{}}")
    hint = hint or (f"It takes {', '.join(known[:12])}" if known else "It takes no keywords")
    return [ConfigError("C002", "unknown key", key=key, value=value, suggestion=hint)]


def own_parameters(function: Any, section: str, given: Iterable[str] = ()) -> dict[str, inspect.Parameter]:
    """Return the keywords that a config may set, each annotated with the type and range of its values.

    Arguments that ptfast passes itself are left out: parameters, outputs and targets, the run's length.
    """
    parameters = keywords(function)
    is_class = inspect.isclass(function)
    if section in ("schedule", "") and is_torch_scheduler(function):
        parameters.pop("optimizer", None)
    elif section in ("optimizer", "task") or (section == "schedule" and not is_class):
        parameters = dict([*parameters.items()][1:])
        if section == "schedule":
            parameters.pop("num_steps", None)
    elif section == "metrics" and is_metric_function(function, tuple(given)):
        parameters = dict([*parameters.items()][2:])
    elif section == "sampling" and not is_class:
        parameters = {name: found for name, found in parameters.items() if name not in _OF_SAMPLES}
    ranges = _RANGES if comes_from(function, *LIBRARIES) else {}
    for name, parameter in parameters.items():
        annotation, default = parameter.annotation, parameter.default
        if annotation is EMPTY or annotation is Any:
            annotation = next((wanted for kind, wanted in _TYPES.items() if isinstance(default, kind)), Any)
        # A default outside the range shows that this library uses the name for something else.
        if (bounds := ranges.get(name)) and bounds.contains(default):
            annotation = Annotated[annotation, bounds]
        if (section, name) == ("optimizer", "fused"):
            annotation = Literal["auto"] | annotation
        parameters[name] = parameter.replace(annotation=annotation)
    return parameters


_WANTED = {
    "data": "a dataset (a class with __getitem__ or __iter__, or a function that returns one)",
    "model": "a torch.nn.Module, nor a function that returns one",
    "optimizer": "a torch.optim.Optimizer",
    "schedule": "a schedule (a function of the step, a scheduler of torch.optim.lr_scheduler, or a "
    "ptfast.techniques.schedule.lr_schedules.LRSchedule)",
    "logger": "a logger (a class with open, log and close)",
    "sampling": "an order of samples (a function such as order(seed, epoch, num_samples), or a Sampler)",
    "callbacks": "a ptfast.core.protocols.Callback",
    "metrics": "a metric (a class with update and compute, or a function of outputs and targets)",
    "task": "a task (a class with the methods of ptfast.core.protocols.Task)",
}
_HOOK_CALLS = {name: [*inspect.signature(getattr(Callback, name)).parameters][1:] for name in HOOKS}


def check_kind(found: Any, path: str, section: str) -> None:
    """Raise C009 unless calling `found` can return the kind of object that the section needs."""
    if isinstance(found, ModuleType):
        # The class is often next to or inside a module of its name: `torch.optim.SGD` for `torch.optim.sgd`.
        before, _, name = path.rpartition(".")
        hint = None
        for prefix, module in ((path, found), (before, sys.modules.get(before, found))):
            classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
            near = nearest(name, classes)
            hint = f"Did you mean {prefix}.{near}?" if near else hint
        raise ConfigError("C009", "is a module, not a class", suggestion=hint)
    if not callable(found):
        raise ConfigError("C009", f"is a value of type {type(found).__name__}, not a class or function")
    if not section:
        return
    is_class = inspect.isclass(found)
    is_method = inspect.ismethod(found) and inspect.isclass(found.__self__)
    if not (is_class or is_method or inspect.isfunction(found) or isinstance(found, functools.partial)):
        raise ConfigError("C009", f"is a built-in function, not {_WANTED[section]}")
    if (getattr(found, "__module__", None) or "").split(".")[0] in sys.stdlib_module_names:
        raise ConfigError("C009", f"is part of Python's standard library, not {_WANTED[section]}")
    if section == "callbacks" and is_class:
        own = [name for name in dir(found) if inspect.isfunction(inspect.getattr_static(found, name))]
        for name in own:
            if name.startswith("on_") and name not in HOOKS:
                hint = f"{did_you_mean(name, HOOKS) or ''} The hooks are {', '.join(HOOKS)}"
                raise ConfigError("C009", f"its method {name} would never be called", suggestion=hint.strip())
        _check_calls(found, _HOOK_CALLS)
    if section == "logger" and is_class:
        for name in LOGGER_METHODS:
            if not hasattr(found, name):
                calls = [f"{each}({', '.join(takes)})" for each, takes in LOGGER_METHODS.items()]
                hint = f"A logger has {', '.join(calls[:-1])} and {calls[-1]}"
                raise ConfigError("C009", f"is not a logger: it has no method {name}", suggestion=hint)
        _check_calls(found, LOGGER_METHODS)
    if not _fits(found, section):
        raise ConfigError("C009", f"is not {_WANTED[section]}")


def _fits(found: Any, section: str) -> bool:
    """Return True if a class or function is, or makes, the kind of object that a section needs."""
    is_class = inspect.isclass(found)
    if section == "optimizer":
        from torch.optim import Optimizer

        return is_class and issubclass(found, Optimizer) and found is not Optimizer
    if section == "model":
        from torch import nn

        if is_class:
            return issubclass(found, nn.Module)
        called = signature(found)
        made = called.return_annotation if called else inspect.Signature.empty
        return made is inspect.Signature.empty or not inspect.isclass(made) or issubclass(made, nn.Module)
    if section == "data":
        # No import is needed: if `found` is a module or an optimizer, torch is loaded.
        torch = sys.modules.get("torch")
        networks = (torch.nn.Module, torch.optim.Optimizer) if torch else ()
        methods = ("__getitem__", "__iter__", "load")
        is_dataset = any(hasattr(found, name) for name in methods)
        return not is_class or (is_dataset and not issubclass(found, networks))
    if section == "schedule":
        if is_torch_scheduler(found):
            for name in ("state_dict", "load_state_dict") if steps_on_metric(found) else ():
                if not hasattr(found, name):
                    raise ConfigError("C009", f"steps on a metric, but has no method {name} to resume with")
            return True
        return hasattr(found, "factor") if is_class else bool(keywords(found))
    if section == "callbacks":
        return is_class and (issubclass(found, Callback) or any(hasattr(found, hook) for hook in HOOKS))
    if section == "metrics":
        return not is_class or (hasattr(found, "update") and hasattr(found, "compute"))
    if section == "task":
        return not is_class or hasattr(found, "loss") or hasattr(found, "step")
    return section == "logger" or not is_class or hasattr(found, "__iter__")


def _check_calls(found: type, calls: Mapping[str, Sequence[str]]) -> None:
    """Raise C009 if a method cannot be called with the arguments that ptfast passes."""
    for name, takes in calls.items():
        method = inspect.getattr_static(found, name, None)
        if not inspect.isfunction(method):
            continue
        try:
            inspect.signature(method).bind("self", *takes)
        except TypeError as error:
            called = f"{name}({', '.join(['self', *takes])})"
            raise ConfigError("C009", f"its method {name} cannot be called as {called}: {error}") from error
