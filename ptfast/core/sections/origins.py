"""Whose code a part of a run is: the one place where the name of a package decides anything."""

from __future__ import annotations

import sys
from typing import Any

from ptfast.core.errors import name_of

GIVEN = "ptfast.given."
"""Start of the import paths of objects that a Python program handed over."""
LIBRARIES = ("torch", "torchvision", "timm", "transformers", "schedulefree")
"""Packages in which a keyword such as `momentum` has one meaning, and so a range."""
CASTING = ("ptfast", "torchvision", "timm")
"""Packages whose models use their input in layers that autocast converts, and nowhere else."""


def comes_from(made: Any, *packages: str) -> bool:
    """Return True for the import path, function, class or object of one of these packages or modules."""
    path = made if isinstance(made, str) else name_of(made)
    return not is_given(path) and path.startswith(tuple(f"{package}." for package in packages))


def is_ours(made: Any) -> bool:
    """Return True for what this package defines."""
    return comes_from(made, "ptfast")


def is_given(path: str) -> bool:
    """Return True for the import path of an object that was handed over in Python."""
    return path.startswith(GIVEN)


def is_instance_of(made: Any, module: str, name: str) -> bool:
    """Return True for an object of a class of another library; nothing is imported to tell."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(made, kind)
