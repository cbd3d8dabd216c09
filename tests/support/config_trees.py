"""Whole configs for tests of their validation: one that is right, and changes to it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from ptfast.config.checks.validate import validate
from ptfast.config.editors.json_schema import schema
from ptfast.config.schema import Config
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, MachineError
from ptfast.core.sections.section import Section
from ptfast.core.sections.targets import plain

HERE = __name__
Tree = dict[str, Any]


class Points(Dataset[int]):
    """A dataset."""

    def __init__(self, root: str = "data", name: str = "points") -> None:
        self.root, self.name = root, name

    def __getitem__(self, index: int) -> int:
        return index


class Net(torch.nn.Module):
    """A model."""

    def __init__(self, num_classes: int = 2, depth: int = 2) -> None:
        super().__init__()


class Shape:
    """A schedule."""

    def __init__(self, milestones: list[Duration] | None = None) -> None:
        self.milestones = milestones

    def factor(self, clock: Any) -> Any:
        return clock


class Writer:
    """A logger."""

    def __init__(self, folder: str = "log") -> None:
        self.folder = folder

    def open(self, run_dir: Any, config: Any) -> None:
        """Nothing."""

    def log(self, record: Any) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Watch:
    """A callback."""

    def __init__(self, every: int = 1) -> None:
        self.every = every

    def on_step(self, run: Any, step: int) -> None:
        """Nothing."""


TREE: Tree = {
    "epochs": 10,
    "steps": None,
    "batch_size": 64,
    "data": {"_target_": f"{HERE}.Points", "root": "data", "val": "10%"},
    "model": {"_target_": f"{HERE}.Net", "depth": 3},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9, "fused": "auto"},
    "schedule": {"_target_": f"{HERE}.Shape", "warmup": "5%"},
    "logger": {"_target_": None},
    "run": {"name": None, "root": "runs"},
    "eval": {"every": "1epochs"},
    "callbacks": [],
    "trust": [],
}


def tree(**changes: Any) -> Tree:
    """`TREE` with values set by dotted key, written with `__` for the dot."""
    changed = copy.deepcopy(TREE)
    for key, value in changes.items():
        *sections, name = key.split("__")
        place = changed
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return changed


def typed(key: str) -> str:
    return "command line"


def in_file(key: str) -> str:
    return f"mine.yaml:{sum(map(ord, key))}"


def check(place: Callable[[str], str] = typed, **changes: Any) -> Config:
    return validate(tree(**changes), place)


def cannot_run(place: Callable[[str], str] = typed, **changes: Any) -> MachineError:
    with pytest.raises(MachineError) as caught:
        check(place, **changes)
    assert "\n" not in str(caught.value)
    assert (caught.value.code, caught.value.exit_code) == ("E005", 4)
    return caught.value


def refused(place: Callable[[str], str] = typed, **changes: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check(place, **changes)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    return caught.value


def to_tree(section: Section) -> Tree:
    """Plain YAML-able data that validates to an equal object."""
    tree: Tree = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            tree[name] = to_tree(value)
        elif name == "target":
            tree |= plain(value) if value else {"_target_": None}
        elif name in ("options", "several"):
            tree |= plain(value)
        else:
            tree[name] = plain(value)
    return tree


def explained_schema() -> dict[str, Any]:
    """The JSON Schema of recipes with its sections in place of references to them."""

    def inlined(part: Any) -> Any:
        if isinstance(part, list):
            return [inlined(item) for item in part]
        if not isinstance(part, dict):
            return part
        name = str(part.get("$ref", "")).rpartition("/")[2]
        return {key: inlined(item) for key, item in {**whole["$defs"].get(name, {}), **part}.items()}

    whole = schema()
    return inlined({key: part for key, part in whole.items() if key != "$defs"})
