"""Orders other than all samples shuffled: by weight, a function of the user's, a sampler of torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from loaders import train_loader
from torch.utils.data import TensorDataset

from ptfast.config.checks.target_checks import check_target
from ptfast.config.read import read_config
from ptfast.core.durations import Duration
from ptfast.core.errors import PtfastError
from ptfast.core.sections.targets import Target
from ptfast.data.build_data import Data, build_data
from ptfast.data.sampling import Sampling
from ptfast.data.sampling.sample_orders import build_order, describe_sampling, weighted

HERE = __name__
LABELS = np.repeat([0, 1, 2], [900, 90, 10])


class Samples(TensorDataset):
    """Numbers of samples as inputs, three classes of unequal size, and weights if asked for."""

    def __init__(self, weights: Any = None, size: int = 40) -> None:
        labels = torch.as_tensor(LABELS[:: len(LABELS) // size][:size])
        super().__init__(torch.arange(size, dtype=torch.float32)[:, None], labels)
        if weights is not None:
            self.weights = weights


def hardest_last(seed: int, epoch: int, num_samples: int, labels: Any, reverse: bool = False) -> Any:
    order = np.random.permutation(num_samples)  # of the global generator, which is seeded for it
    return order[np.argsort(labels[order], kind="stable")][:: -1 if reverse else 1]


def impure(num_samples: int) -> Any:
    return np.random.default_rng().permutation(num_samples)


def short(num_samples: int) -> Any:
    return range(num_samples - 1)


def beyond(num_samples: int) -> Any:
    return range(1, num_samples + 1)


def fractions(num_samples: int) -> Any:
    return torch.rand(num_samples)


def failing(epoch: int) -> Any:
    return 1 // epoch


def ordered(
    dataset: Any, path: str = f"{weighted.__module__}.weighted", val: str = "0", **kwargs: Any
) -> Data:
    """Data whose training samples come as `sampling._target_=path` says."""
    target, problems = check_target(Target(path, kwargs), "sampling")
    assert problems == []
    data = build_data(dataset, val=Duration.parse(val), seed=0, task="auto", normalize=False)
    return replace(data, order=build_order(Sampling(target=target), data, seed=0))


def test_each_class_comes_as_often_as_the_others() -> None:
    order = weighted(0, 0, 1000, labels=LABELS)
    assert all(abs(count - 333) < 60 for count in np.bincount(LABELS[order]))
    assert np.array_equal(order, weighted(0, 0, 1000, labels=LABELS))
    assert not np.array_equal(order, weighted(0, 1, 1000, labels=LABELS))
    assert not np.array_equal(order, weighted(1, 0, 1000, labels=LABELS))
    ignored = np.where(LABELS == 1, -100, LABELS)
    assert 1 not in LABELS[weighted(0, 0, 1000, labels=ignored)]


def test_samples_come_in_proportion_to_their_weights() -> None:
    weights = np.array([0.0, 3.0, 1.0, 0.0])
    counts = np.bincount(weighted(3, 2, 8000, weights=weights), minlength=4)
    assert counts[0] == counts[3] == 0
    assert counts[1] / counts[2] == pytest.approx(3, rel=0.1)


def test_weights_of_held_out_samples_are_left_out() -> None:
    weights = np.where(np.arange(40) < 30, 0.0, 1.0)
    data = ordered(Samples(weights), val="25%")
    order = data.order(0, 0)
    assert order is not None
    assert (data.train.fetch(order)[0] >= 30).all()  # type: ignore[union-attr]
    sampling = Sampling(target=Target(f"{weighted.__module__}.weighted"))
    assert describe_sampling(sampling, data) == "by the weights of the dataset"


@pytest.mark.parametrize(
    "make",
    [
        lambda: ordered(Samples()),
        lambda: ordered(Samples(), f"{HERE}.hardest_last", reverse=True),
        lambda: ordered(Samples(np.arange(40.0)), "torch.utils.data.WeightedRandomSampler"),
    ],
    ids=["weighted", "function", "torch"],
)
def test_any_loader_rank_and_first_step_give_the_same_samples(make: Callable[[], Data]) -> None:
    def taken(data: Data, first: int = 0, **given: Any) -> list[list[float]]:
        loader = train_loader(data, batch_size=16, micro_batches=2, **given)
        steps = [
            [number for micro in batch.micro_batches for number in micro.data[0].flatten().tolist()]
            for batch in loader.steps(first, 7)
        ]
        loader.close()
        return steps

    whole = taken(make(), kind="plain")
    assert len({tuple(step) for step in whole}) == 7
    assert taken(make(), first=4, kind="plain") == whole[4:]
    torch.manual_seed(5)
    for kind in ("memory", "device"):
        assert taken(make(), kind=kind) == whole
    halves = [taken(make(), kind="plain", rank=rank, world_size=2) for rank in (0, 1)]
    assert [[*a, *b] for a, b in zip(*halves, strict=True)] == whole


@pytest.mark.parametrize(
    ("code", "what", "make"),
    [
        ("D008", "sum to zero", lambda: ordered(Samples(np.zeros(40)))),
        ("D008", "contain -1 for sample 39", lambda: ordered(Samples([1.0] * 39 + [-1.0]))),
        ("D008", "contain nan for sample 0", lambda: ordered(Samples([float("nan")] * 40))),
        ("D008", "are 3 numbers, and it has 40 samples", lambda: ordered(Samples([1, 2, 3]))),
        ("D008", "a number for each sample is due", lambda: ordered(Samples("heavy"))),
        ("C011", "has no attribute `weights`", lambda: ordered(Samples(), by="weights")),
        ("C017", "another order for the same seed", lambda: ordered(Samples(), f"{HERE}.impure")),
        ("C017", "gives 39 places, and an epoch has 40", lambda: ordered(Samples(), f"{HERE}.short")),
        ("C017", "names sample 40, and they are numbered", lambda: ordered(Samples(), f"{HERE}.beyond")),
        ("C017", "where the numbers of samples are due", lambda: ordered(Samples(), f"{HERE}.fractions")),
        ("C017", "in epoch 0 it raises ZeroDivisionError", lambda: ordered(Samples(), f"{HERE}.failing")),
        (
            "C017",
            "its constructor raises ValueError",
            lambda: ordered(Samples(), "torch.utils.data.RandomSampler", num_samples=0),
        ),
        ("C011", "an order of their own", lambda: read_config(["sampling=weighted", "batching=buckets"])),
        ("C011", "shuffle_buffer=5", lambda: read_config(["sampling=weighted", "data.shuffle_buffer=5"])),
        ("C002", "sampling.bye=x", lambda: read_config(["sampling=weighted", "sampling.bye=x"])),
    ],
)
def test_refused(code: str, what: str, make: Callable[[], Any]) -> None:
    with pytest.raises(PtfastError) as caught:
        make()
    assert caught.value.code == code
    assert what in str(caught.value)
