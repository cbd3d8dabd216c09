"""The origin of a run's parts; no other module decides anything by the name of a package."""

from __future__ import annotations

import sys
from typing import Any

from ptfast.core.errors import name_of

GIVEN = "ptfast.given."
"""Prefix of the import paths of objects that a Python program passed in."""
LIBRARIES = ("torch", "torchvision", "timm", "transformers", "schedulefree")
"""Packages in which a keyword such as `momentum` has a known meaning, and therefore a range."""
CASTING = ("ptfast", "torchvision", "timm")
"""Packages whose models use their inputs only in layers that autocast converts."""


def comes_from(made: Any, *packages: str) -> bool:
    """Return True if `made` (a path, function, class or object) is from one of these packages or modules."""
    path = made if isinstance(made, str) else name_of(made)
    return not is_given(path) and path.startswith(tuple(f"{package}." for package in packages))


def is_ours(made: Any) -> bool:
    """Return True if ptfast defines `made`."""
    return comes_from(made, "ptfast")


def is_given(path: str) -> bool:
    """Return True for the import path of an object that was passed in from Python."""
    return path.startswith(GIVEN)


def is_instance_of(made: Any, module: str, name: str) -> bool:
    """Return True if `made` is an instance of `module.name`, without importing the module."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(made, kind)
