"""Objects that a Python program passes to a run, each under an import path: `ptfast.given.Net_3fa94c21`."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
import itertools
import re
import sys
from collections.abc import Container, Mapping
from typing import Any
from weakref import WeakValueDictionary

from ptfast.core.errors import ConfigError, name_of
from ptfast.core.sections.origins import GIVEN, is_given

_targets: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""Classes and functions by the last part of their path, while a reference to them exists."""


def __getattr__(name: str) -> Any:
    """Return the object that was given under `name`; C009 if it is gone, or in another process."""
    if name.startswith("__"):
        raise AttributeError(name)
    if (found := _targets.get(name)) is None:
        raise _missing(f"{GIVEN}{name}")
    return found


def absent() -> Any:
    """Stand in for a dataset that this process does not have: C009 when it is built."""
    raise _missing("the dataset").changed(key="data")


def check_present(tree: dict[str, Any], *, trains: bool) -> None:
    """Raise one C009 for all objects in a config that this process does not have.

    If it does not train, missing callbacks are removed from `tree`, and a missing dataset fails when used.
    """
    if not trains:
        given = tree.get("callbacks") or ()
        tree["callbacks"] = [x for x in given if not _lacks(x.get("_target_") if isinstance(x, dict) else x)]
        for section in (tree.get("data", {}), *(tree.get("evals") or {}).values()):
            if isinstance(section, dict) and _lacks(section.get("_target_")):
                section["_target_"] = f"{GIVEN}{absent.__name__}"
    if names := [path for path in re.findall(rf"{re.escape(GIVEN)}\w+", str(tree)) if _lacks(path)]:
        raise _missing(", ".join(dict.fromkeys(names)))


def _lacks(path: Any) -> bool:
    return isinstance(path, str) and is_given(path) and path.removeprefix(GIVEN) not in {*_targets, "absent"}


def _missing(names: str) -> ConfigError:
    what = f"{names}: handed to ptfast in Python, and not in this process"
    hint = "Run the script again, or hand it over again in Python: ptfast.evaluate(RUN, model=..., data=...)"
    return ConfigError("C009", what, suggestion=hint)


def give(value: Any, key: str, taken: Container[str] = ()) -> tuple[str, Any]:
    """Return an import path for `value` in a config, and the object to keep alive so that the path works.

    A class or function of a module keeps its own path. All other objects, including classes of a notebook,
    get a path of their class name and a digest of their structure and source, so that a resumed run can tell
    if they are the same. Weights are not in the digest: a run trains a copy of a module.

    Args:
        taken: paths of the other objects of the same call.

    Raises C009 for a lambda.
    """
    is_made = isinstance(value, (type, functools.partial)) or inspect.isroutine(value)
    named: Any = getattr(value, "func", value) if is_made else type(value)
    if named.__qualname__.endswith("<lambda>"):
        what, hint = "a lambda has no name that the run's config could keep", "Write def NAME(...) instead"
        raise ConfigError("C009", what, key=key, value="lambda", suggestion=hint)
    path = f"{named.__module__}.{named.__qualname__}"
    if named is value and _is_importable(value):
        return path, value
    name = f"{named.__name__.lstrip('_')}_{_digest(value, named)}"
    names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    path = next(path for each in names if (path := f"{GIVEN}{each}") not in taken)
    target = value if is_made else _class_of(value)
    give_again({path: target})
    return path, target


def give_again(objects: Mapping[str, Any]) -> None:
    """Register the objects of `give` again, because another object may have taken the same path since."""
    _targets.update({path.removeprefix(GIVEN): made for path, made in objects.items() if is_given(path)})


def _is_importable(value: Any) -> bool:
    """Return True if another process can import this class or function by its path."""
    module = sys.modules.get(value.__module__)
    if module is None or value.__module__ == "__main__" or getattr(module, "__spec__", None) is None:
        return False
    found: Any = module
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def _digest(value: Any, named: Any) -> str:
    parts = [name_of(value)]
    with contextlib.suppress(Exception):  # user code may fail: __len__, __repr__ and so on
        if isinstance(value, functools.partial):
            parts.append(repr((value.args, value.keywords)))
        elif hasattr(value, "state_dict"):
            parts += [f"{name} {part.dtype} {tuple(part.shape)}" for name, part in value.state_dict().items()]
            parts.append(repr(value))
        elif hasattr(value, "__len__"):
            parts.append(str(len(value)))
    # In a notebook, the source of functions is available, but not that of classes.
    for function in vars(named).values() if isinstance(named, type) else [named]:
        with contextlib.suppress(Exception):  # no source in an interpreter
            parts.append(inspect.getsource(function))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def _class_of(value: Any) -> type:
    """Return a class like `value`'s whose constructor returns `value`, or a copy if it is a module."""
    kind = type(value)
    is_module = hasattr(value, "forward")

    def make(cls: type) -> Any:
        return copy.deepcopy(value) if is_module else value

    # `make` returns no instance of the new class, so Python does not call its __init__.
    own = {"__new__": make, "__init__": lambda self: None, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), own)
