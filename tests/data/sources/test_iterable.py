"""Iterable data that draws from the global generators: one stream, wherever it is taken up."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loaders import train_loader
from running import same_bits, train, weights
from torch.utils.data import IterableDataset

from ptfast.core.durations import Duration
from ptfast.data.build_data import build_data


class Noise(IterableDataset[Any]):
    """Ten samples a pass, from all three generators."""

    num_classes = 2

    def __iter__(self) -> Iterator[Any]:
        for index in range(10):
            yield torch.rand(3) + random.random() + np.random.random(), index % 2


def steps(first: int, last: int, *, rank: int = 0, world_size: int = 1, seed: int = 0) -> list[torch.Tensor]:
    data = build_data(Noise(), val=Duration(0, "percent"), seed=seed, task="auto")
    given: dict[str, Any] = {"seed": seed, "rank": rank, "world_size": world_size, "normalize": False}
    loader = train_loader(data, batch_size=4, micro_batches=2, kind="auto", **given)
    result: list[torch.Tensor] = []
    for step in loader.steps(first, last):
        # Training draws from the same generators in between.
        torch.manual_seed(len(result))
        torch.rand(7)
        random.random()
        result += [batch.data[0] for batch in step.micro_batches]
    return result


def test_a_resumed_stream_draws_the_same() -> None:
    whole = steps(0, 8)
    torch.manual_seed(99)
    np.random.seed(99)
    assert same_bits(steps(5, 8), whole[10:])
    assert len(torch.cat(whole).unique()) == 8 * 4 * 3
    assert not same_bits(steps(0, 8, seed=1), whole)


def test_ranks_get_parts_of_one_stream() -> None:
    torch.manual_seed(1)
    first = steps(0, 3, rank=0, world_size=2)
    torch.manual_seed(2)
    second = steps(0, 3, rank=1, world_size=2)
    assert same_bits([b for pair in zip(first, second, strict=True) for b in pair], steps(0, 3))


def test_reading_a_stream_leaves_the_generators_alone() -> None:
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(1), random.random()
    torch.manual_seed(5)
    random.seed(5)
    data = build_data(Noise(), val=Duration(0, "percent"), seed=0, task="auto")
    assert data.info.num_classes == 2
    assert same_bits((torch.rand(1), random.random()), expected)


def test_a_resumed_run_has_the_bits_of_one_that_was_not(in_tmp: Path) -> None:
    words = ("data=custom", "data._target_=test_iterable.Noise", "model.hidden=[4]", "batch_size=8")
    words = (*words, "model.dropout=0.2", "schedule=constant", "saving.every=3steps", "log_every=1")
    assert train(*words, "steps=9", "run.dir=whole") == 0
    assert train(*words, "steps=4", "run.dir=parts") == 0
    assert train(*words, "steps=9", "run.dir=parts", "run.resume=auto") == 0
    assert same_bits(weights(Path("parts")), weights(Path("whole")))
