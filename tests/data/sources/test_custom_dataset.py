"""A user's own datasets: what is told by looking, and the same bits from every loader."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from loaders import train_loader
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, DataError
from ptfast.data.build_data import build_data
from ptfast.data.loaders.dataset_source import Collate
from ptfast.data.loaders.loader_choice import choose

NO_VAL = Duration(0, "percent")


def loader(data: Any, kind: str = "plain", **changes: Any) -> Any:
    return train_loader(data, **{"batch_size": 8, "micro_batches": 2, "workers": 2, "kind": kind, **changes})


class Noisy(Dataset[Any]):
    """Vectors to which a transform adds noise from the global generators."""

    classes = ("small", "large")

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.rand(3) + random.random() + np.random.random()
        return index + noise.float(), int(index >= 20)


def load(dataset: Any, val: Duration = NO_VAL, task: str = "auto") -> Any:
    return build_data(dataset, val=val, seed=0, task=task)


def test_facts_are_told_by_looking():
    data = load(Noisy(), Duration(10, "percent"))
    info = data.info
    assert (info.kind, info.task, info.num_classes, info.class_names) == (
        "features",
        "classification",
        2,
        ("small", "large"),
    )
    assert info.input_shape == (3,)
    assert data.note == "Noisy: 36 train, 4 val"


def test_random_transforms_are_repeated_by_workers_and_by_a_resumed_run():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    plain = list(loader(load(Noisy())).steps(0, 10))
    assert torch.equal(torch.get_rng_state(), state)
    for stream, expected in (
        (loader(load(Noisy()), "workers").steps(0, 10), plain),
        (loader(load(Noisy())).steps(6, 10), plain[6:]),
    ):
        for one, other in zip(stream, expected, strict=True):
            for a, b in zip(one.micro_batches, other.micro_batches, strict=True):
                assert torch.equal(a.data[0], b.data[0])
    (first, _), _ = plain[0].micro_batches[0]
    (later, _), _ = plain[5].micro_batches[0]
    assert len(torch.cat([first % 1, later % 1]).unique()) == 24


def test_a_tensor_data_set_is_held_in_memory():
    images = torch.randint(0, 256, (30, 3, 4, 6), dtype=torch.uint8)
    data = load(TensorDataset(images, torch.arange(30) % 3))
    assert (data.info.kind, data.info.num_classes, data.info.input_shape) == ("image", 3, (3, 4, 6))
    batches = loader(data, "auto")
    assert batches.kind == "memory"
    assert next(batches.steps(0, 1)).micro_batches[0].data[0].shape == (4, 3, 4, 6)


def test_batched_fetching_is_used_where_there_is_one():
    class Batched(Noisy):
        def __getitem__(self, index: int) -> Any:
            raise AssertionError("one by one")

        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [(torch.full((2,), float(i)), i % 2) for i in indices]

    (inputs, _), _ = next(loader(load(Batched())).steps(0, 1)).micro_batches[0]
    assert inputs.shape == (4, 2)


def test_a_data_set_that_fails_is_one_line():
    class Broken(Noisy):
        def __getitem__(self, index: int) -> Any:
            raise KeyError("column")

    line = r"data\._target_=\S+Broken: __getitem__ raises KeyError \(test_custom_dataset.py:\d+\): 'column'"
    with pytest.raises(DataError, match=line):
        load(Broken())
    for count in ("three", 2.5, 0):
        with pytest.raises(DataError, match="num_classes is not a whole number of at least 1"):
            load(type("Counting", (Noisy,), {"num_classes": count})())
    with pytest.raises(DataError, match="is not a torch dataset"):
        load(object())
    with pytest.raises(DataError, match="has no samples"):
        load(TensorDataset(torch.zeros(0, 2), torch.zeros(0)))


class Boxes(Noisy):
    """Samples of unequal size, as mappings."""

    num_classes = 3

    def __getitem__(self, index: int) -> Any:
        return {"image": torch.full((3, 4, 4 + index % 2), float(index)), "boxes": torch.ones(index % 3, 4)}


def listed(samples: list[Any]) -> dict[str, Any]:
    """The images, to one of which noise is added."""
    return {"images": [sample["image"] for sample in samples], "noise": torch.rand(2)}


OWN = Collate(listed, key="data.collate", value="mine.listed")


def test_a_function_of_ones_own_makes_the_batches():
    class Saying(Boxes):
        def collate_fn(self, samples: list[Any]) -> Any:
            return [sample["boxes"] for sample in samples]

    data = build_data(Saying(), val=NO_VAL, seed=0, task="mine.Task", collate=OWN)
    assert (data.info.kind, data.info.num_classes, data.info.class_names) == ("other", 3, ("small", "large"))
    assert data.note == "Saying: 40 train; batches by test_custom_dataset.listed"
    plain, others = list(loader(data).steps(0, 7)), list(loader(data, "workers").steps(4, 7))
    for one, other in zip(plain[4:], others, strict=True):
        for (first, count), (second, _) in zip(one.micro_batches, other.micro_batches, strict=True):
            assert len(first["images"]) == count == 4
            assert torch.equal(first["noise"], second["noise"])
            assert all(map(torch.equal, first["images"], second["images"]))
    noise = [data["noise"] for step in plain for data, _ in step.micro_batches]
    assert len(torch.cat(noise).unique()) == 28
    (batch, _), _ = next(loader(load(Saying(), task="mine.Task")).steps(0, 1)).micro_batches
    assert [boxes.shape[1] for boxes in batch] == [4] * 4
    with pytest.raises(
        ConfigError, match="a collate function of your own makes batches only when they are needed"
    ):
        choose(data.train.take(np.arange(9)), kind="memory")


def test_own_batches_of_inputs_and_targets_are_like_torchs():
    images = torch.randint(0, 256, (30, 3, 4, 6), dtype=torch.uint8)
    pairs = TensorDataset(images, torch.arange(30) % 3)
    cut = Collate(
        lambda samples: tuple(default_collate([(x[..., :4], y) for x, y in samples])), key="", value=""
    )
    data = build_data(pairs, val=NO_VAL, seed=0, task="auto", collate=cut)
    assert (data.info.task, data.info.num_classes, data.info.input_shape) == ("classification", 3, (3, 4, 4))
    (inputs, _), _ = next(loader(data).steps(0, 1)).micro_batches[0]
    assert (inputs.shape, inputs.dtype) == ((4, 3, 4, 4), torch.float32)

    class Paired(Stream):
        def collate_fn(self, samples: list[Any]) -> Any:
            return torch.stack([2 * x for x, _ in samples]), torch.tensor([y for _, y in samples])

    assert values(loader(load(Paired(16))).steps(0, 2), 2) == list(range(0, 32, 2))


@pytest.mark.parametrize(
    ("collate", "task", "says"),
    [
        (
            None,
            "mine.Task",
            r"data\._target_=\S+Boxes: torch's default_collate cannot batch .* data.collate=",
        ),
        (None, "auto", "samples have the parts image, boxes, .* named as a target.* task=mine.Task"),
        (lambda samples: samples, "auto", "gives a list of 1, the first a dict with the keys image, boxes"),
        (lambda samples: ["a", None], "mine.Task", "data.collate=mine.own: gives a list of 2, .* no tensor"),
        (
            lambda samples: samples[0]["mask"],
            "mine.Task",
            r"data.collate=mine.own: raises KeyError \(test_custom",
        ),
    ],
)
def test_what_makes_no_batch_is_one_line(collate: Any, task: str, says: str):
    own = collate and Collate(collate, key="data.collate", value="mine.own")
    with pytest.raises(DataError, match=says):
        list(loader(build_data(Boxes(), val=NO_VAL, seed=0, task=task, collate=own)).steps(0, 1))


class Stream(IterableDataset[Any]):
    """The numbers from 0 to `size` - 1."""

    num_classes = 2

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return ((torch.tensor([float(i)]), i % 2) for i in range(self.size))


def values(stream: Any, count: int) -> list[float]:
    steps = islice(stream, count)
    return [float(v) for step in steps for batch in step.micro_batches for v in batch.data[0].flatten()]


def test_iterable_data_is_read_in_order_again_from_its_start_and_resumed_by_skipping():
    data = load(Stream(20), Duration(10, "percent"))
    assert (data.info.num_classes, data.note) == (
        2,
        "Stream: train of unknown length; nothing is held out of iterable data",
    )
    batches = loader(data)
    assert batches.plan.steps_per_epoch is None
    assert values(batches.steps(0, 5), 5) == [i % 20 for i in range(40)]
    assert values(batches.steps(3, 5), 2) == [i % 20 for i in range(24, 40)]


def test_ranks_divide_iterable_data():
    data = load(Stream(16))
    parts = [values(loader(data, rank=rank, world_size=2).steps(0, 2), 2) for rank in (0, 1)]
    assert parts == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]


def test_iterable_data_without_samples_is_refused():
    with pytest.raises(DataError, match="yields no samples"):
        load(Stream(0))


class Plain:
    """Pairs by number, in a class without a base."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)] * 3), index % 2


@pytest.mark.parametrize(
    "held", [Plain(), [Plain()[i] for i in range(3)], TensorDataset(torch.zeros(3, 3), torch.zeros(3).long())]
)
@pytest.mark.parametrize("split", ["val", "test"])
def test_held_out_data_is_whatever_has_a_length_and_items(held: Any, split: str):
    dataset = Noisy()
    setattr(dataset, split, held)
    data = load(dataset)
    assert (len(data.train), len(getattr(data, split))) == (40, 3)


@pytest.mark.parametrize("value", [0.1, True, "val/", {"a": 1}, torch.zeros(3, 3), np.zeros(3), Plain])
def test_what_is_no_held_out_data_is_rejected(value: Any):
    dataset = Noisy()
    dataset.val = value  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"its attribute val is .*, which is no dataset. Give it __len__ and"):
        load(dataset)


def test_a_tensor_dataset_with_items_of_its_own_is_read_by_them():
    class Shifted(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            return self.tensors[0][index] + 1, self.tensors[1][index]

    data = load(Shifted(torch.zeros(4, 3), torch.arange(4) % 2))
    assert data.train.fetch(np.arange(4))[0].tolist() == [[1.0] * 3] * 4
