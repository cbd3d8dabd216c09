"""Check the import paths in a config from elsewhere, before the import and along every alias."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ptfast.config.schema import flatten, lies_in
from ptfast.core.errors import COMMAND_LINE, ConfigError, together
from ptfast.core.machine import cache_folder
from ptfast.core.sections.targets import EXTRAS, locate

_CALL = re.compile(r"\$\{[^{}]*:|\$\{[^{}]*\$\{")
"""An interpolation that calls a resolver, or whose name contains another interpolation."""
_URL = re.compile(r"\b(?!file:|sqlite:)[A-Za-z][\w+.-]*://|\bpipe:", re.IGNORECASE)
_OUTSIDE = re.compile(r"^(file:)?[/~\\]|^sqlite:////|(^|[/\\])\.\.([/\\]|$)", re.IGNORECASE)
"""A path that is absolute or leads to a parent folder."""
ROOTS = ("torch.nn", "torch.optim", "torchvision", "ptfast", *EXTRAS)
# A config from elsewhere may call only the functions in these packages: the rest of torchvision also
# has functions that download and unpack files.
_FUNCTION_ROOTS = ("torchvision.models", "ptfast.models", "ptfast.data.sampling.sample_orders")
_CLASS_ROOTS = (
    *("ptfast.data", "ptfast.models", "ptfast.optim", "ptfast.tasks", "torchvision.transforms"),
    "ptfast.techniques.schedule.lr_schedules",
    *("ptfast.report.loggers", "ptfast.report.mlflow_logger"),
)


def locate_trusted(path: str, packages: tuple[str, ...] = ()) -> Any:
    """Import the object that `path` names; raise C009 unless every step of the path is trusted."""
    covered = (*ROOTS, *packages)

    def visit(found: Any, path: str) -> None:
        """Reject a step out of the trusted packages, such as the alias `torchvision.datasets.utils.os`."""
        is_module = isinstance(found, ModuleType)
        home = found.__name__ if is_module else getattr(found, "__module__", None)
        inside = isinstance(home, str) and lies_in(home, covered)
        if not inside and not (is_module and home == path):
            raise ConfigError("C009", f"not trusted, {path} leads to {home or 'a built-in'}")

    if not lies_in(path, covered):
        package = path.split(".")[0]
        hint = f"If you trust it, add 'trust=[{package}]' to the command line"
        hint = None if package in sys.stdlib_module_names else hint
        what = "not trusted, it lies outside what a config file from elsewhere may name"
        raise ConfigError("C009", what, suggestion=hint)
    if any(part.startswith("_") for part in path.split(".")):
        raise ConfigError("C009", "not trusted, it is private")
    found = locate(path, visit)
    home = getattr(found, "__module__", None) or ""
    if lies_in(home, packages):
        return found
    if inspect.isclass(found):
        from torch import nn, optim
        from torch.utils.data import Dataset

        parts = (nn.Module, optim.Optimizer, optim.lr_scheduler.LRScheduler, Dataset)
        fits = lies_in(home, _CLASS_ROOTS) or issubclass(found, parts)
    else:
        fits = inspect.isfunction(found) and lies_in(home, _FUNCTION_ROOTS)
    if not fits:
        what = "not trusted, it is no model, dataset, optimizer or other part of a run"
        raise ConfigError("C009", what)
    return found


def check_reach(tree: dict[str, Any], place: Callable[[str], str], *, trains: bool = True) -> None:
    """Reject values of a config from elsewhere that read the environment, name a server or leave its folder.

    Typed values are allowed. Otherwise, somebody else's file could send a variable's value to any host.
    """
    found: list[ConfigError] = []
    for key, value in flatten(tree).items():
        text = str(value)
        if place(key) == COMMAND_LINE or (not trains and key.split(".")[0] == "logger"):
            continue
        calls, url = _CALL.search(text), _URL.search(text)
        leaves = lies_in(key, ("logger", "run.dir", "run.root")) and _OUTSIDE.search(text)
        if calls or url or leaves:
            what = (
                "reads the environment" if calls else "names a server" if url else "writes outside its folder"
            )
            hint = f"If you trust it, give the value yourself: {key}=VALUE"
            what = f"not trusted, a config file from elsewhere {what}"
            found.append(ConfigError("C009", what, key=key, value=text, place=place(key), suggestion=hint))
    if found:
        raise together(found)


def remember(config_file: Path) -> None:
    """Record in the cache folder, if it is writable, that this user made the run of a frozen config."""
    marker = _marker(config_file)
    with contextlib.suppress(OSError):
        marker.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        marker.touch(mode=0o600)


def is_own(config_file: Path) -> bool:
    """Return True if `remember` was called on a file with this exact content, even in another folder."""
    try:
        marker = _marker(config_file)
        # In a shared cache folder, trust only markers in a folder that this user owns.
        return marker.is_file() and marker.parent.stat().st_uid == os.getuid()
    except OSError:
        return False


def _marker(config_file: Path) -> Path:
    digest = hashlib.sha256(config_file.read_bytes()).hexdigest()
    return cache_folder() / f"own-runs-{os.getuid()}" / digest
