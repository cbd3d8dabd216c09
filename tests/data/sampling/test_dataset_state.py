"""Generators that a dataset contains draw the same for a sample in any process, which tells it the epoch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from loaders import eval_loader
from test_custom_dataset import NO_VAL, loader
from torch.utils.data import Dataset

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError
from ptfast.data.build_data import build_data
from ptfast.data.loaders.loader_choice import choose
from ptfast.data.sampling.counter_draws import generators_of


class Noise:
    """A transform with generators of its own."""

    def __init__(self) -> None:
        self.legacy, self.torch = np.random.RandomState(0), torch.Generator().manual_seed(0)


class Holding(Dataset[Any]):
    """Its number and epoch, and what its generators draw, each of another kind."""

    classes = ("a", "b")

    def __init__(self) -> None:
        self.rng, self.python, self.transforms = np.random.default_rng(0), random.Random(0), [Noise()]
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        drawn = torch.rand((), generator=self.transforms[0].torch)
        values = [self.rng.random(), self.python.random(), self.transforms[0].legacy.random_sample(), drawn]
        return torch.tensor([index, self.epoch, *values]), index % 2


class Lazy(Holding):
    """Makes its generator when the first sample is read."""

    def __init__(self) -> None:
        super().__init__()
        self.late: Any = None

    def __getitem__(self, index: int) -> Any:
        self.late = self.late or np.random.default_rng(0)
        return torch.tensor([index, self.epoch, self.late.random()]), index % 2


def rows(
    kind: str, dataset: Any = None, first: int = 0, **changes: Any
) -> dict[tuple[int, int], list[float]]:
    """By epoch and number, what each sample of two epochs of three steps was."""
    data = build_data(dataset or Holding(), val=NO_VAL, seed=0, task="auto")
    found: dict[tuple[int, int], list[float]] = {}
    for step, batch in enumerate(loader(data, kind, **changes).steps(first, 6), first):
        for micro_batch in batch.micro_batches:
            for number, epoch, *values in micro_batch.data[0].tolist():
                assert epoch == step // 3, "set_epoch came before"
                found[int(epoch), int(number)] = values
    return found


@pytest.mark.parametrize("dataset", [Holding, Lazy])
def test_draws_depend_on_epoch_and_sample_alone(dataset: Any) -> None:
    plain = rows("plain", dataset())
    assert len(plain) == 48
    for column in zip(*plain.values(), strict=True):
        assert len({*column}) == 48, "no two samples draw the same"
    assert rows("workers", dataset()) == plain
    assert rows("workers", dataset(), workers=1) == plain
    assert rows("plain", dataset(), micro_batches=1) == plain
    resumed = rows("workers", dataset(), first=4)
    assert resumed == {key: plain[key] for key in resumed}
    assert len(resumed) == 16


def test_an_evaluation_between_epochs_draws_the_same_and_disturbs_nothing() -> None:
    data = build_data(Holding(), val=Duration(6, "samples"), seed=0, task="auto")
    alone = [
        step.micro_batches[0].data[0] for step in loader(data, batch_size=9, micro_batches=1).steps(0, 4)
    ]
    evaluated = eval_loader(data.val, data.info, batch_size=6)
    seen = []
    for step, before in zip(loader(data, batch_size=9, micro_batches=1).steps(0, 4), alone, strict=True):
        assert torch.equal(step.micro_batches[0].data[0], before)
        seen += [batch.data[0] for batch in evaluated]
    assert all(torch.equal(batch, seen[0]) for batch in seen)


def test_what_changes_by_epoch_is_not_held_in_memory() -> None:
    data = build_data(Holding(), val=NO_VAL, seed=0, task="auto")
    assert "its random generators (rng, python, transforms.legacy, transforms.torch) are seeded" in data.note
    assert choose(data.train, kind="auto").kind != "memory"
    with pytest.raises(ConfigError, match="samples in memory stay those of the first epoch"):
        choose(data.train, kind="memory")


def test_generators_are_found_in_small_containers_and_circles() -> None:
    held = Holding()
    held.transforms.append(held)  # type: ignore[arg-type]
    held.python = [held.python] * 100  # type: ignore[assignment]
    names = [name for name, _ in generators_of(held)]
    assert names[0] == "rng"
    assert "python" not in names
    assert generators_of(np) is not None
