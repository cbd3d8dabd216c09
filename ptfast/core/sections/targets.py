"""Classes and functions that a config names by import path: lookup and construction."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, MachineError, PtfastError
from ptfast.core.sections.spelling import nearest

EMPTY: Any = inspect.Parameter.empty
METRIC_FACTS = frozenset({"num_classes", "num_labels", "task", "ignore_index"})
"""Keywords of metrics that are filled from the data."""
_DIRECTIVES = ("_target_", "_partial_")


@dataclass(frozen=True)
class Target:
    """A class or function by import path, with its keyword arguments.

    Args:
        path: import path, e.g. `torch.optim.AdamW`.
        kwargs: keyword arguments; a `Target` among them (also inside lists and mappings) is built first.
        partial: bind the keyword arguments instead of calling it.
    """

    path: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    partial: bool = False

    def resolve(self) -> Any:
        """Import the object at `path`; C009 if it does not exist or its module fails to import."""
        try:
            return locate(self.path)
        except PtfastError as problem:
            raise problem.at("_target_", self.path) from problem.__cause__

    def build(self, *args: Any, **facts: Any) -> Any:
        """Call the target with its keywords, and fill its other parameters from `facts` that are not None."""
        function = self.resolve()
        takes = keywords(function)
        filled = {name: fact for name, fact in facts.items() if name in takes and fact is not None}
        kwargs = {**filled, **built(self.kwargs)}
        for name, value in kwargs.items():
            if isinstance(value, list) and name in takes and _takes_tensor(takes[name].annotation):
                kwargs[name] = _as_tensor(name, value, self.path)
        if self.partial:
            return functools.partial(function, *args, **kwargs)
        return function(*args, **kwargs)


def _takes_tensor(annotation: Any) -> bool:
    """Return True for the annotations `Tensor` and `Tensor | None`, without importing torch."""
    torch = sys.modules.get("torch")
    kinds = typing.get_args(annotation) or (annotation,)
    return torch is not None and [kind for kind in kinds if kind is not type(None)] == [torch.Tensor]


def _as_tensor(name: str, numbers: list[Any], path: str) -> Any:
    """Convert a list of numbers, such as class weights, to a tensor of floats."""
    import torch

    try:
        return torch.tensor(numbers, dtype=torch.get_default_dtype())
    except (TypeError, ValueError) as error:
        what = f"{path} takes a tensor, and this is no list of numbers"
        raise ConfigError("C004", what, key=name, value=numbers) from error


def parse_target(tree: dict[str, Any]) -> Target:
    """Convert a mapping with `_target_` to a `Target`, including nested ones."""
    path = tree.get("_target_")
    if path is None or path == "???":
        what = "required, but not set"
        raise ConfigError("C016", what, key="_target_", suggestion="Give the import path of a class")
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")):
        what = "expected an import path such as package.module.Class"
        raise ConfigError("C009", what, key="_target_", value=path)
    for key in tree:
        if not isinstance(key, str) or (key.startswith("_") and key.endswith("_") and key not in _DIRECTIVES):
            raise ConfigError("C002", "unknown key", key=str(key), value=tree[key])
    partial = tree.get("_partial_", False)
    if not isinstance(partial, bool):
        raise ConfigError("C004", "expected true or false", key="_partial_", value=partial)
    kwargs = {key: parse_value(value, key) for key, value in tree.items() if key not in _DIRECTIVES}
    return Target(path, kwargs, partial)


def parse_value(value: Any, key: str) -> Any:
    """Convert every mapping with a `_target_` in `value` to a `Target`; `key` is for messages."""
    if isinstance(value, dict):
        try:
            if "_target_" in value:
                return parse_target(value)
            return {name: parse_value(item, name) for name, item in value.items()}
        except PtfastError as problem:
            raise problem.at(key) from None
    if isinstance(value, list):
        return [parse_value(item, key) for item in value]
    return value


def locate(path: str, visit: Callable[[Any, str], None] | None = None) -> Any:
    """Import the object at a dotted path, or raise a C009; `visit` is called with each part and its path."""
    parts = path.split(".")
    # The user's modules are in the current folder, which an installed command does not have on its path.
    if (here := str(Path.cwd())) not in sys.path and "" not in sys.path:
        sys.path.append(here)
    found = _import(parts[0])
    for index, part in enumerate(parts):
        before, walked = ".".join(parts[:index]), ".".join(parts[: index + 1])
        if index and hasattr(found, part):
            found = getattr(found, part)
        elif index and hasattr(found, "__path__"):
            found = _import(walked, found)
        elif index:
            raise _does_not_exist(found, before, part)
        if visit:
            visit(found, walked)
    return found


EXTRAS = ("schedulefree",)
"""Packages of built-in options; the extra of the same name installs each."""


def _import(module: str, parent: ModuleType | None = None) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise ConfigError("C009", f"importing {module} fails: {error}") from error
        before, _, name = module.rpartition(".")
        if parent is not None:
            raise _does_not_exist(parent, before, name) from None
        if module in EXTRAS:
            hint = f"Install it with pip install 'ptfast[{module}]'"
            raise MachineError("E004", f"needs the package {module}", suggestion=hint) from None
        hint = f"Is {module} installed, or in the current folder?"
        raise ConfigError("C009", f"there is no module {module}", suggestion=hint) from None
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError("C009", f"importing {module} fails: {reason}") from error


def _does_not_exist(parent: Any, before: str, name: str) -> PtfastError:
    names = [candidate for candidate in dir(parent) if not candidate.startswith("_")]
    # Prefer names with the same case of the first letter: classes for classes, functions for functions.
    like = [candidate for candidate in names if candidate[0].isupper() == name[0].isupper()] or names
    found = nearest(name, like) or nearest(name, names)
    hint = f"Did you mean {before}.{found}?" if found else None
    return ConfigError("C009", f"{before} has no {name}", suggestion=hint)


def signature(function: Any) -> inspect.Signature | None:
    """Return the signature, with annotations evaluated if possible; None if Python cannot inspect it."""
    try:
        # Python resolves the names in any callable's annotations, but evaluates all annotations or none.
        found = inspect.signature(function, eval_str=True)
    except Exception:
        try:
            found = inspect.signature(function)
        except (ValueError, TypeError):
            return None
    named = function.func if isinstance(function, functools.partial) else function
    body = inspect.unwrap(named.__init__ if inspect.isclass(named) else named)

    def evaluated(annotation: Any) -> Any:
        if not isinstance(annotation, str):
            return annotation
        try:
            # One by one, because another annotation may name something imported only for type checkers.
            return eval(annotation, dict(getattr(body, "__globals__", {})))
        except Exception:
            return EMPTY

    parameters = [each.replace(annotation=evaluated(each.annotation)) for each in found.parameters.values()]
    return found.replace(parameters=parameters, return_annotation=evaluated(found.return_annotation))


def is_torch_scheduler(found: Any) -> bool:
    """Return True if `found` is a scheduler class in the style of torch, without importing torch."""
    torch = sys.modules.get("torch")
    schedulers = () if torch is None else (torch.optim.lr_scheduler.LRScheduler,)
    return inspect.isclass(found) and (issubclass(found, schedulers) or steps_on_metric(found))


def steps_on_metric(found: Any) -> bool:
    """Return True for a scheduler class whose `step` requires a metric, as in ReduceLROnPlateau."""
    takes = [*keywords(getattr(found, "step", None)).values()][1:] if inspect.isclass(found) else []
    required = [parameter.name for parameter in takes if parameter.default is parameter.empty]
    return len(required) == 1 and required[0] not in ("epoch", "closure")  # `closure`: an optimizer


def keywords(function: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of `function` that can be passed by keyword."""
    found = signature(function)
    if found is None:
        return {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: parameter for name, parameter in found.parameters.items() if parameter.kind in by_name}


def is_metric_function(function: Any, given: Container[str] = ()) -> bool:
    """Return True for a function whose first two parameters are left for outputs and targets."""
    first = list(keywords(function).values())[:2]
    return (
        len(first) == 2
        and not inspect.isclass(function)
        and not any(p.default is not p.empty or p.name in METRIC_FACTS or p.name in given for p in first)
    )


def swallows_keywords(function: Any) -> bool:
    """Return True if `function` takes `**kwargs`, so that its signature cannot reveal an unknown keyword."""
    found = signature(function)
    return found is None or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found.parameters.values())


def takes(function: Any, name: str) -> bool:
    """Return True if `function` accepts the keyword `name`."""
    return name in keywords(function) or swallows_keywords(function)


def plain(value: Any) -> Any:
    """Convert `value` to plain data for YAML; `parse_value` restores the targets in it."""
    if isinstance(value, Target):
        partial = {"_partial_": True} if value.partial else {}
        return {"_target_": value.path, **partial, **plain(value.kwargs)}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(plain(item) for item in value)
    if isinstance(value, (Duration, Path)):
        return str(value)
    return value


def built(value: Any, **facts: Any) -> Any:
    """Build the targets in `value`, the innermost first, each with the `facts` that it accepts."""
    if isinstance(value, Target):
        return replace(value, kwargs=built(value.kwargs, **facts)).build(**facts)
    if isinstance(value, dict):
        return {key: built(item, **facts) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(built(item, **facts) for item in value)
    return value
