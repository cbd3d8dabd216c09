"""ptfast: train PyTorch models from YAML recipes, as fast as the machine allows."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ptfast.api import Result, evaluate, load, predict, prepare, sweep, train
    from ptfast.core.errors import PtfastError

__version__ = "0.2.0"
__all__ = ["PtfastError", "Result", "evaluate", "load", "predict", "prepare", "sweep", "train"]


def __getattr__(name: str) -> Any:
    """Import the names of `__all__` on first use, so that importing ptfast does not import torch."""
    if name == "PtfastError":
        return import_module("ptfast.core.errors").PtfastError
    if name == "given":
        return import_module("ptfast.core.sections.given")
    if name in __all__:
        return getattr(import_module("ptfast.api"), name)
    raise AttributeError(f"module 'ptfast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
