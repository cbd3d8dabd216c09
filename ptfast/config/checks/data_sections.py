"""Inheritance of dataset keys: evaluation sets inherit from `data`, a mixture's parts from its first part."""

from __future__ import annotations

import re
from typing import Any

from ptfast.config.files import paths
from ptfast.config.files.yaml_file import lineage
from ptfast.core.errors import ConfigError
from ptfast.data import MIXTURE, SPLIT_KEYS

Tree = dict[str, Any]
_LOCATIONS = ("root", "path", "shards")
_OF_THE_RUN = ("defaults", "normalize")
_NOT_INHERITED = ("normalize", "shuffle_buffer", "weight")
_SET_NAME = re.compile(r"(?!(train|val|test|best)$)[A-Za-z][\w-]*")


def with_inherited(tree: Tree) -> Tree:
    """Fill in inherited keys: for evaluation sets from `data`, for parts of a mixture from the first part."""
    data, evals = tree.get("data"), tree.get("evals")
    base: Tree = data if isinstance(data, dict) else {}
    if base.get("_target_") == MIXTURE:
        given = base.get("parts") or {}
        given = given if isinstance(given, dict) else {str(number): part for number, part in enumerate(given)}
        parts: dict[str, Any] = {}
        for name, own in given.items():
            parts[name] = _inherited(next(iter(parts.values()), {}), own, f"data.parts.{name}")
        weights = {name: part.pop("weight", 1.0) for name, part in parts.items() if isinstance(part, dict)}
        tree = {**tree, "data": {**base, "parts": parts, "weights": weights}}
        base = next(iter(parts.values()), {})
    if not isinstance(evals, dict):
        return tree
    for name in evals:
        if not _SET_NAME.fullmatch(name):
            raise ConfigError("C013", "not a name of a set, or that of a split", key=f"evals.{name}")
    return {**tree, "evals": {name: _inherited(base, own, f"evals.{name}") for name, own in evals.items()}}


def _inherited(base: Tree, own: Any, key: str) -> Any:
    """Add the keys of `base` that a dataset's section does not set, if both have the same class."""
    if not isinstance(own, dict):
        return own
    if (option := own.get("data")) is not None:
        paths.check_option("data", option, ["data"], key)
        keys = [item for file in lineage("data", paths.options("data")[option]) for item in file.data.items()]
        # Keys that an option leaves unset are inherited; normalization belongs to the run.
        own = {k: v for k, v in keys if k not in _OF_THE_RUN and v not in (None, "???")} | own
        del own["data"]
    if own.get("_target_", base.get("_target_")) != base.get("_target_"):
        return own
    # Data in another location does not inherit files of targets and held-out splits.
    moves = any(own.get(name) is not None for name in _LOCATIONS)
    held_out = [k for k in base if k.startswith(("val_", "test_"))]
    left = (*_NOT_INHERITED, *(("targets", "val", *SPLIT_KEYS, *_LOCATIONS, *held_out) if moves else ()))
    return {k: v for k, v in base.items() if k not in left} | own
