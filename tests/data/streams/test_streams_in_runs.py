"""Iterable data in runs: shuffled by a buffer, resumed by skipping, evaluated, scaled and trained on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from loaders import eval_loader, train_loader
from refusals import Capture
from running import same_bits, summary, train, weights
from streamed import (
    NUMBERS,
    Noisy,
    Plain,
    Sharded,
    WithHeldOut,
    build,
    load,
    some,
    values,
)
from torch.utils.data import IterableDataset, TensorDataset

from ptfast.core.errors import ConfigError
from ptfast.data.streams.iterable import shuffled
from ptfast.data.streams.stream_loaders import PartBatches, WholeBatches


def test_a_buffer_shuffles_and_loses_nothing() -> None:
    order = list(shuffled(iter(range(1000)), 64, seed=3))
    assert sorted(order) == list(range(1000))
    assert order == list(shuffled(iter(range(1000)), 64, seed=3))
    assert order != list(shuffled(iter(range(1000)), 64, seed=4))
    # None comes more than 63 early; most come within a few sizes.
    assert max(value - place for place, value in enumerate(order)) <= 63
    assert torch.corrcoef(torch.tensor([order[:64], list(range(64))], dtype=torch.float64))[0, 1] < 0.6
    assert list(shuffled(iter(range(9)), 1, seed=3)) == list(range(9))


def test_a_buffered_stream_is_the_same_for_any_workers_and_resumes() -> None:
    def loader(**options: Any) -> Any:
        source = load(Plain(), shuffle_buffer=8).train
        return build(source, micro_batches=2, **options)

    whole = some(loader(), 12)
    assert some(loader(kind="workers", workers=2), 12) == whole
    assert some(loader(), 5, first=7) == whole[7:]
    flat = [value for step in whole for value in step]
    assert flat[: len(NUMBERS)] != NUMBERS
    assert sorted(flat[: len(NUMBERS)]) == NUMBERS


def test_a_map_style_data_set_has_no_buffer() -> None:
    with pytest.raises(ConfigError, match=r"data.shuffle_buffer=8: this data is shuffled as a whole"):
        load(TensorDataset(torch.rand(20, 3), torch.arange(20) % 2), shuffle_buffer=8)


@pytest.mark.parametrize("workers", [0, 3])
def test_resuming_begins_with_the_pass_that_the_run_was_in(workers: int) -> None:
    def loader() -> Any:
        return build(Noisy(), kind="workers", workers=workers)

    one = loader()
    whole = [values(batch) for batch in one.steps(0, 20)]
    one.close()
    assert max(value for step in whole for value in step) > 200
    state = one.marks.state(14)
    assert state["epoch"] >= 2
    again = loader()
    note = again.marks.load(state, 14)
    assert (
        note == f"iterable data is read again from the start of its pass {state['epoch'] + 1} up to step 14"
    )
    assert some(again, 6, first=14) == whole[14:]
    assert "had divided otherwise" in loader().marks.load({**state, "readers": 9}, 14)


def test_an_evaluation_reads_every_sample_once() -> None:
    data = load(WithHeldOut())
    assert data.note == "WithHeldOut: train of unknown length, val of unknown length, 2 test"
    shared: dict[str, Any] = {"batch_size": 4, "normalize": False}
    for options in ({"kind": "plain"}, {"kind": "workers", "workers": 3}):
        loader = eval_loader(data.val, data.info, **shared, **options)
        for _ in range(2):
            batches = [(batch.data[0].flatten(), batch.num_samples) for batch in loader]
            assert sorted(float(v) for inputs, number in batches for v in inputs[:number]) == NUMBERS
        loader.close()
    whole = load(Plain())
    of_ranks: list[list[Any]] = []
    for rank in range(3):
        loader = eval_loader(whole.train, whole.info, rank=rank, world_size=3, **shared)
        of_ranks.append(list(loader))
    assert len({len(batches) for batches in of_ranks}) == 1
    seen = [float(v) for batches in of_ranks for data, n in batches for v in data[0].flatten()[:n]]
    assert sorted(seen) == NUMBERS


class Images(IterableDataset[Any]):
    """Images as torchvision has them."""

    num_classes = 2

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(0)
        for number in range(12):
            yield torch.randint(256, (3, 4, 6), dtype=torch.uint8, generator=generator), number % 2


def test_images_of_a_stream_are_scaled() -> None:
    data = load(Images())
    loader = train_loader(data, batch_size=4, kind="auto")
    assert isinstance(loader.batches, WholeBatches)
    (batch,) = loader.steps(0, 1)
    expected = torch.stack([image for image, _ in islice(Images(), 4)]) / 255
    torch.testing.assert_close(batch.micro_batches[0].data[0], expected)


def test_a_run_trains_evaluates_and_resumes(in_tmp: Path, capsys: Capture) -> None:
    words = ("data=custom", "data._target_=streamed.WithHeldOut", "model.hidden=[4]", "batch_size=6")
    words = (*words, "data.shuffle_buffer=4", "schedule=constant", "saving.every=4steps", "log_every=1")
    words = (
        *words,
        "dataloader=workers",
        "dataloader.workers=2",
        "data.normalize=false",
        "eval.every=6steps",
    )
    assert train(*words, "steps=14", "run.dir=whole") == 0
    assert (
        "workers (2 processes, the dataset shares itself out over 2 data workers)" in capsys.readouterr().out
    )
    assert train(*words, "steps=10", "run.dir=parts") == 0
    assert train(*words, "steps=14", "run.dir=parts", "run.resume=auto") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "iterable data is read again from the start of its pass 2 up to step 10" in out
    assert same_bits(weights(Path("parts")), weights(Path("whole")))
    assert summary(Path("whole"))["val"] == summary(Path("parts"))["val"]
    assert {"loss", "accuracy"} <= set(summary(Path("whole"))["test"])


def test_parts_of_a_stream_are_not_padded() -> None:
    with pytest.raises(ConfigError, match="drop_last=false or true"):
        build(Sharded(), kind="workers", workers=2, drop_last="pad")


def test_the_loader_of_a_run_is_built_by_the_same_rules() -> None:
    data = load(Sharded())
    loader = train_loader(data, batch_size=6, micro_batches=2, normalize=False, kind="workers", workers=2)
    assert isinstance(loader.batches, PartBatches)
    assert loader.kind == "workers"
