"""Loaders: every kind gives the same bits, from any step on, cut in any way over ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from loaders import eval_loader, train_loader

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, DataError
from ptfast.core.protocols import DataInfo, StepBatch
from ptfast.data.build_data import Data, build_data
from ptfast.data.map_source import MapSource, TensorSource
from ptfast.data.sources.digits import Digits
from ptfast.data.transforms.augment_plan import Augment

CPU = torch.device("cpu")
NONE = {"crop_padding": 0, "flip": False}
BOTH = {"crop_padding": 2, "flip": True}
REFLECTED = {**BOTH, "crop_padding_mode": "reflect"}


@pytest.fixture(scope="module")
def digits() -> Data:
    return build_data(Digits(), val=Duration(10, "percent"), seed=0, task="auto")


@pytest.fixture(scope="module")
def color() -> Data:
    """Random color images that are not square."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (100, 6, 10, 3), dtype=torch.uint8, generator=generator)
    info = DataInfo(kind="image", task="classification", num_classes=4, input_shape=(3, 6, 10), in_channels=3)
    source = TensorSource(images, torch.arange(100) % 4, images=True)
    return Data(info, source, source, None, "")


def loader(data: Data, kind: str, **changes: Any) -> Any:
    return train_loader(data, **{"batch_size": 24, "workers": 2, "augment": NONE, "kind": kind, **changes})


def same(one: Iterator[StepBatch], other: Iterator[StepBatch]) -> int:
    """Assert that two streams of batches are bit-identical, memory format included; return their length."""
    count = 0
    for a, b in zip(one, other, strict=True):
        assert a.num_samples == b.num_samples
        for (data_a, num_a), (data_b, num_b) in zip(a.micro_batches, b.micro_batches, strict=True):
            assert num_a == num_b
            for x, y in zip(data_a, data_b, strict=True):
                assert torch.equal(x, y)
                assert x.stride() == y.stride()
        count += 1
    return count


@pytest.mark.parametrize("name", ["digits", "color"])
@pytest.mark.parametrize(
    "augment",
    [NONE, BOTH, REFLECTED, {"crop_padding": 0, "flip": True}, {"crop_padding": 3, "flip": False}],
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_every_kind_gives_the_same_bits(
    name: str, augment: dict[str, Any], channels_last: bool, request: pytest.FixtureRequest
):
    data = request.getfixturevalue(name)
    kinds = {
        kind: loader(data, kind, augment=augment, channels_last=channels_last, micro_batches=3)
        for kind in ("plain", "memory", "workers")
    }
    assert [loader.kind for loader in kinds.values()] == list(kinds)
    for kind in ("memory", "workers"):
        assert same(kinds["plain"].steps(2, 12), kinds[kind].steps(2, 12)) == 10


def test_images_without_room_for_padded_copies_are_augmented_batch_by_batch(
    color: Data, monkeypatch: pytest.MonkeyPatch
):
    quick = loader(color, "memory", augment=BOTH)
    monkeypatch.setattr("ptfast.data.loaders.build_loaders.available_memory", lambda: 0)
    slow = loader(color, "memory", augment=BOTH)
    assert same(quick.steps(0, 6), slow.steps(0, 6)) == 6
    assert (quick.reason, slow.reason) == (
        "as the config says",
        "as the config says; no room for padded copies",
    )


@pytest.mark.parametrize("augment", [NONE, BOTH])
def test_padded_epochs_are_the_same_from_every_kind(color: Data, augment: dict[str, Any]):
    for kind in ("memory", "device"):
        one, other = (
            loader(color, k, augment=augment, drop_last="pad").steps(0, 12) for k in ("plain", kind)
        )
        assert same(one, other) == 12


@pytest.mark.parametrize("kind", ["plain", "memory", "workers"])
@pytest.mark.parametrize("augment", [NONE, BOTH])
def test_starting_at_any_step_gives_the_batches_of_an_unbroken_run(color: Data, kind: str, augment: Any):
    whole = list(loader(color, kind, augment=augment).steps(0, 13))
    assert same(iter(whole[7:]), loader(color, kind, augment=augment).steps(7, 13)) == 6


def test_two_ranks_share_the_micro_batches_of_one(color: Data):
    alone = list(loader(color, "memory", micro_batches=4, augment=BOTH).steps(0, 10))
    ranks = [
        loader(color, "memory", micro_batches=4, rank=r, world_size=2, augment=BOTH).steps(0, 10)
        for r in (0, 1)
    ]
    joined = [
        StepBatch(a.micro_batches + b.micro_batches, a.num_samples) for a, b in zip(*ranks, strict=True)
    ]
    assert same(iter(alone), iter(joined)) == 10


@pytest.mark.parametrize("wanted", [BOTH, REFLECTED])
def test_augmentation_equals_a_crop_and_flip_of_each_image_by_itself(color: Data, wanted: dict[str, Any]):
    source, augment = color.train, Augment(**wanted, seed=3)
    assert isinstance(source, TensorSource)
    batches = loader(color, "memory", augment=wanted, normalize=False, seed=3)
    for step in (0, 5, 9):
        (inputs, _), _ = next(batches.steps(step, step + 1)).micro_batches[0]
        (share,), _ = batches.batches.indices_at(step)
        top, left, flipped = augment.draw(share)
        assert len(set(zip(top, left, flipped, strict=True))) > 3
        for image, i, y, x, mirror in zip(inputs, share.indices, top, left, flipped, strict=True):
            expected = source.inputs[i].permute(2, 0, 1)
            expected = expected.flip(2) if mirror else expected
            expected = torch.nn.functional.pad(expected, (2, 2, 2, 2), augment.crop_padding_mode)
            expected = expected[:, y : y + 6, x : x + 10].float() * torch.tensor(1 / 255)
            assert torch.equal(image, expected)


def test_inputs_are_normalized_by_the_training_statistics(digits: Data):
    inputs = torch.cat([b.micro_batches[0].data[0] for b in loader(digits, "memory").steps(0, 68)])
    assert len(inputs) == len(digits.train)
    assert abs(float(inputs.mean())) < 1e-5
    assert abs(float(inputs.std(correction=0)) - 1) < 1e-5


def test_batches_survive_later_steps(digits: Data):
    first = next(iter(loader(digits, "memory").steps(0, 1))).micro_batches[0].data[0].clone()
    stream = loader(digits, "memory").steps(0, 200)
    kept = next(stream).micro_batches[0].data[0]
    assert len(list(stream)) == 199
    assert torch.equal(first, kept)


@pytest.mark.parametrize("world_size", [1, 3])
def test_evaluation_sees_each_sample_once_over_all_ranks(digits: Data, world_size: int):
    assert digits.val is not None
    labels, total = [], 0
    for rank in range(world_size):
        batches = eval_loader(digits.val, digits.info, batch_size=25, rank=rank, world_size=world_size)
        assert len(digits.val) == 180
        for _ in range(2):
            seen = [data[1] for data, _ in batches]
        labels += seen
        total += sum(num for _, num in batches)
    assert total == 180
    assert torch.equal(torch.cat(labels), digits.val.fetch(np.arange(180))[1])


def test_validation_and_training_samples_are_apart_and_stable(digits: Data):
    again = build_data(Digits(), val=Duration(10, "percent"), seed=0, task="auto")
    assert digits.val is not None
    assert again.val is not None
    everything = np.arange(180)
    assert torch.equal(digits.val.fetch(everything)[0], again.val.fetch(everything)[0])
    assert digits.note == "digits: 1,617 train, 180 val"
    whole = build_data(Digits(), val=Duration(0, "percent"), seed=0, task="auto")
    assert whole.val is None
    assert len(whole.train) == 1797
    parts = [digits.train.fetch(np.arange(1617)), digits.val.fetch(everything)]
    rows = torch.cat([images for images, _ in parts]).flatten(1)
    assert len(rows.unique(dim=0)) == len(whole.train.fetch(np.arange(1797))[0].flatten(1).unique(dim=0))


def test_a_validation_share_that_leaves_nothing_is_refused():
    with pytest.raises(DataError, match="leaves none to train on"):
        build_data(Digits(), val=Duration(1797, "samples"), seed=0, task="auto")


class Failing(MapSource):
    """Raises once it is asked for a certain sample."""

    def __init__(self, error: Any) -> None:
        self.error = error

    def __len__(self) -> int:
        return 64

    def fetch(self, indices: Any, epoch: int = 0) -> Any:
        if 40 in indices:
            raise self.error
        return torch.zeros(len(indices), 2), torch.zeros(len(indices), dtype=torch.long)


def unpicklable() -> Exception:
    error = RuntimeError("cannot travel")
    error.args = (lambda: None, "cannot travel")
    return error


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            KeyError("no such row"),
            r"data: the dataset raises KeyError \(test_loaders.py:\d+\): 'no such row'",
        ),
        (unpicklable(), "data: the dataset raises RuntimeError .*: .*cannot travel"),
        (DataError("D005", "is damaged", key="x.jpg"), "^x.jpg: is damaged.$"),
    ],
)
def test_a_failure_in_a_worker_is_one_error(error: Exception, line: str):
    info = DataInfo(kind="features", task="classification", num_classes=2)
    data = Data(info, Failing(error), None, None, "")
    with pytest.raises(DataError, match=line):
        list(loader(data, "workers", batch_size=8).steps(0, 8))


def test_a_data_set_that_cannot_be_pickled_is_refused_where_it_must_be(monkeypatch: pytest.MonkeyPatch):
    from ptfast.data.loaders.worker_processes import WorkerPool

    monkeypatch.setattr("torch.multiprocessing.get_start_method", lambda: "spawn")
    with pytest.raises(DataError, match="cannot be sent to worker processes"):
        WorkerPool(lambda share: share, 1, 1)


def test_workers_leave_the_generators_of_the_run_alone(digits: Data):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    list(loader(digits, "workers").steps(0, 3))
    assert torch.equal(torch.rand(3), expected)


def test_only_images_are_augmented():
    info = DataInfo(kind="features", task="classification", num_classes=2)
    data = Data(info, TensorSource(torch.zeros(9, 3), torch.zeros(9).long()), None, None, "")
    with pytest.raises(ConfigError, match="only uint8 images are augmented"):
        loader(data, "auto", augment=BOTH)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends workers with their parent on Linux only")
def test_workers_outlive_a_terminal_signal_and_die_with_their_parent(tmp_path: Path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing, os, signal, sys, time
            import numpy as np, torch
            from ptfast.data.sampling.sampler import MicroBatchIndices
            from ptfast.data.loaders.worker_processes import WorkerPool

            def fetch(share):
                time.sleep(0.05)
                return torch.zeros(1)

            # Signals that come while a worker is only starting leave it alone, too.
            os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGUSR1))
            pool = WorkerPool(fetch, 2, 1)
            stream = pool.fetch(MicroBatchIndices(0, np.zeros(1, np.int64), 1) for _ in range(100))
            next(stream)
            workers = [process.pid for process in multiprocessing.active_children()]
            for pid in workers:
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
                    os.kill(pid, number)
            for _ in range(5):
                next(stream)
            print(*workers, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == -9, done.stderr
    workers = [int(pid) for pid in done.stdout.split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in workers)


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
