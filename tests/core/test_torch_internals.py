"""Whatever torch keeps private and the package uses is there in the installed version."""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conftest import ROOT
from torch import nn

from ptfast.core.tensors import torch_internals


def private_names(tree: ast.AST) -> Iterator[str]:
    """The dotted names below torch, imported or used, that have a private part."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = dotted(node)
        for name in names:
            first, *parts = name.split(".")
            plain = all(part.isidentifier() for part in parts)
            if plain and first == "torch" and any(part.startswith("_") for part in parts):
                yield name


def dotted(node: ast.expr) -> list[str]:
    """The name that attributes of a module spell, or nothing for those of another value."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return [".".join([node.id, *parts])] if isinstance(node, ast.Name) else []


def found(name: str) -> Any:
    """The object of a dotted name, its modules imported on the way."""

    def step(owner: Any, part: str) -> Any:
        if not hasattr(owner, part):
            importlib.import_module(f"{owner.__name__}.{part}")
        return getattr(owner, part)

    first, *parts = name.split(".")
    return functools.reduce(step, parts, importlib.import_module(first))


def test_what_is_private_is_there() -> None:
    files: list[Path] = [*(ROOT / "ptfast").rglob("*.py")]
    names = {name for file in files for name in private_names(ast.parse(file.read_text("utf-8")))}
    assert len(names) > 10
    for name in sorted(names):
        assert found(name) is not None, name
    for name in torch_internals.__all__:
        assert getattr(torch_internals, name) is not None
    assert issubclass(nn.BatchNorm2d, torch_internals.BatchNorm)
    assert torch_internals.data_worker._worker_info is None
    for name in ("_set_worker_pids", "_remove_worker_pids", "_error_if_any_worker_fails"):
        assert callable(getattr(torch_internals.worker_signals, name))
