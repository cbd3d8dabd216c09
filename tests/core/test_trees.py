"""Tensors in nested containers: found and replaced wherever they are."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
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


class Batch(dict[str, Any]):
    """A batch of a user's own class, which is made of something else than its items."""

    def __init__(self, source: str, **items: Any) -> None:
        super().__init__(**items)
        self.source = source


class Boxes(list[Any]):
    """A list that knows its size."""

    def __init__(self, height: int, width: int) -> None:
        self.size = height, width


class Ordered(Pair):
    """A named tuple with a constructor of its own."""

    def __new__(cls, both: tuple[Tensor, Any]) -> Ordered:
        return super().__new__(cls, *both)


def test_a_batch_keeps_its_class_and_what_it_holds_beside_items() -> None:
    boxes = Boxes(3, 4)
    boxes.append(torch.zeros(5))
    batch = Batch("a.jpg", image=torch.zeros(2), boxes=boxes, pair=Ordered((torch.zeros(1), "x")))
    # As the loader of a GPU does.
    moved = map_tensors(lambda tensor: tensor.to("meta"), batch)
    assert (type(moved), moved.source, list(moved)) == (Batch, "a.jpg", ["image", "boxes", "pair"])
    assert (type(moved["boxes"]), moved["boxes"].size, len(moved["boxes"])) == (Boxes, (3, 4), 1)
    assert type(moved["pair"]) is Ordered
    assert {tensor.device.type for tensor in tensors_in(moved)} == {"meta"}
    assert {tensor.device.type for tensor in tensors_in(batch)} == {"cpu"}


def test_a_mapping_with_defaults_and_outputs_of_transformers_stay_themselves() -> None:
    found = map_tensors(len, defaultdict(list, a=torch.zeros(3)))
    assert found["b"] == []
    outputs = pytest.importorskip("transformers.modeling_outputs")
    given = outputs.BaseModelOutput(last_hidden_state=torch.zeros(2, 3), hidden_states=(torch.zeros(2, 3),))
    moved = map_tensors(lambda tensor: tensor.to("meta"), given)
    assert type(moved) is outputs.BaseModelOutput
    assert moved.last_hidden_state.device.type == moved.hidden_states[0].device.type == "meta"
    assert given.last_hidden_state.device.type == "cpu"
