"""Check what kind of class or function a target is."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from ptfast.core.errors import ConfigError, did_you_mean
from ptfast.core.protocols import HOOKS, LOGGER_METHODS, Callback
from ptfast.core.sections.spelling import nearest
from ptfast.core.sections.targets import is_torch_scheduler, keywords, signature, steps_on_metric

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
    """Raise a C009 unless `found` can be called for what the section needs."""
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
    """Return True if a class or function is, or makes, what a section needs."""
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
        # Nothing is imported to tell: a part of a network has come with torch.
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
    """Raise a C009 for a method that cannot be called with what it is given."""
    for name, takes in calls.items():
        method = inspect.getattr_static(found, name, None)
        if not inspect.isfunction(method):
            continue
        try:
            inspect.signature(method).bind("self", *takes)
        except TypeError as error:
            called = f"{name}({', '.join(['self', *takes])})"
            raise ConfigError("C009", f"its method {name} cannot be called as {called}: {error}") from error
