"""Tensors in nested containers: batches, and what models take and return.

Our functions traverse batches, because torch's know exact types only, and ignore a user's subclass of dict.
torch's functions traverse models' inputs and outputs. Their module is private, so only this one imports it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ptfast.core.tensors.dtensors import SavedTensor

__all__ = ["tree_leaves", "tree_map"]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and mappings, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with `function` applied to every `Tensor`, `SavedTensor`, or object with a `to` method.

    Containers keep their types and other attributes.
    """
    if isinstance(value, (Tensor, SavedTensor)) or hasattr(value, "to"):
        return function(value)
    if isinstance(value, (dict, list)):
        changed = copy.copy(value)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            changed[key] = map_tensors(function, item)
        return changed
    if isinstance(value, tuple):
        # A named tuple's constructor takes its fields.
        make = getattr(type(value), "_make", type(value))
        return make([map_tensors(function, item) for item in value])
    return value


def copied(value: Any) -> Any:
    """Copy a batch, for code that writes to it in place."""
    return map_tensors(lambda part: part.clone() if isinstance(part, Tensor) else copy.deepcopy(part), value)
