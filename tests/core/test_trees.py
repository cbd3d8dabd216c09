"""Tensors in nested containers: found and replaced wherever they are."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ptfast.core.tensors.trees import map_tensors, tensors_in


class Pair(NamedTuple):
    """A batch as a user may have it."""

    inputs: Tensor
    rest: Any


def test_tensors_are_found_wherever_they_are() -> None:
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert list(tensors_in(((a, 3), {"b": [b, None]}, "text", c))) == [a, b, c]


def test_tensors_are_replaced_in_containers_of_any_kind() -> None:
    tree = Pair(torch.zeros(1), [OrderedDict(a=(torch.zeros(2), "text")), None])
    assert map_tensors(len, tree) == Pair(1, [{"a": (2, "text")}, None])  # pyright: ignore[reportArgumentType]
    assert isinstance(map_tensors(len, tree), Pair)
