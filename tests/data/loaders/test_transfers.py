"""Batches on their way to the device: a stream beside the training, and memory that is shared, not copied."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from running import build_run, same_bits
from torch import Tensor

from ptfast.config.read import read_config
from ptfast.data.loaders.pipeline import open_side_stream, prefetched
from ptfast.data.map_source import as_tensor
from ptfast.data.sources import arrays
from ptfast.data.sources.text_dataset import Windows
from ptfast.report.panel import build_panel
from ptfast.training.fit import fit
from ptfast.training.stages import data_stage

CPU = torch.device("cpu")
ALL = ("steps=14", "eval.every=7steps", "model.hidden=[16]", "batch_size=128", "gradients.accumulate=2")


class Recorder:
    """A side whose order of events is written down."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def fill(self, batches: Iterator[Any]) -> tuple[Any, int] | None:
        self.events.append("fill")
        batch = next(batches, None)
        self.events.append("filled")
        return None if batch is None else (batch, len(self.events))

    def hand_over(self, mark: Any) -> None:
        assert self.events[mark - 1] == "filled"
        self.events.append(f"hand over {self.events[:mark].count('filled')}")


def test_the_next_batch_is_filled_before_this_one_trains() -> None:
    side = Recorder()
    for batch in prefetched(iter("abc"), side):
        side.events.append(f"train {batch}")
    fill = ["fill", "filled"]
    expected = [*fill]
    for number, batch in enumerate("abc", 1):
        expected += [*fill, f"hand over {number}", f"train {batch}"]
    assert side.events == expected


def test_the_wait_for_a_batch_on_its_way_is_told_of() -> None:
    side = Recorder()
    batches = prefetched(iter("ab"), side, side.events.append)
    assert list(batches) == ["a", "b"]
    told = [event for event in side.events if event in ("transfer", "data") or "over" in event]
    assert told == ["transfer", "hand over 1", "data", "transfer", "hand over 2", "data"]


def test_nothing_is_filled_that_nobody_wants() -> None:
    side, taken = Recorder(), []
    batches = prefetched(iter(lambda: taken.append(1) or len(taken), None), side)
    assert next(batches) == 1
    assert len(taken) == 2
    assert list(prefetched(iter(()), side)) == []


@pytest.mark.parametrize(
    "words",
    [
        ("dataloader=memory",),
        ("dataloader=plain", "augment=crop_flip"),
        ("dataloader=memory", "augment=crop_flip"),
    ],
    ids=["static", "read", "gathered"],
)
def test_every_loader_gives_the_same_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    plain = build_run(tmp_path / "plain", *ALL, *words)
    assert plain.train_loader.side is None  # pyright: ignore[reportAttributeAccessIssue]
    side: Any = Recorder()
    monkeypatch.setattr(data_stage, "open_side_stream", lambda device: side)
    ahead = build_run(tmp_path / "ahead", *ALL, *words)
    loaders: list[Any] = [ahead.train_loader, ahead.eval_loaders["val"]]
    assert all(loader.side is side for loader in loaders)
    assert (ahead.train_loader.kind, ahead.train_loader.reason) == (
        plain.train_loader.kind,
        plain.train_loader.reason,
    )
    assert fit(plain) == fit(ahead) == "finished"
    assert sum(str(event).startswith("hand over") for event in side.events) >= 14
    assert same_bits(plain.model.state_dict(), ahead.model.state_dict())
    assert plain.metrics["val"] == ahead.metrics["val"]


def test_a_switch_turns_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_stage, "open_side_stream", lambda device: Recorder())
    run = build_run(tmp_path, *ALL, "dataloader.side_stream=false")
    assert run.train_loader.side is None  # pyright: ignore[reportAttributeAccessIssue]
    assert run.choices.get("dataloader.side_stream") is False


def test_the_panel_shows_what_is_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ALL
    monkeypatch.setattr(data_stage, "open_side_stream", lambda device: Recorder())
    config, run = read_config(words)[1], build_run(tmp_path, *words)
    _, rows, warnings = build_panel(dict(config), run)
    assert dict(rows)["transfers"] == "on a side stream, one batch ahead"
    assert "kernels" not in dict(rows)
    assert warnings == []
    run.precision = dataclasses.replace(run.precision, warning="it is slow here")
    assert build_panel(dict(config), run)[2] == ["it is slow here"]
    run.choices.choose("backend.cudnn_benchmark", True, "inputs have had few shapes so far")
    choice = "backend.cudnn_benchmark=true because inputs have had few shapes so far"
    assert choice in [value for _, value in build_panel(dict(config), run)[1]]


def test_a_cpu_has_no_side_stream() -> None:
    assert open_side_stream(CPU) is None


@pytest.mark.gpu
@pytest.mark.parametrize("words", [("dataloader=memory",), ("dataloader=plain", "augment=crop_flip")])
def test_a_side_stream_changes_no_bit(tmp_path: Path, words: tuple[str, ...]) -> None:
    fixed = (*ALL, *words, "device=cuda", "backend=deterministic", "dataloader.pin=true")
    beside = build_run(tmp_path / "beside", *fixed)
    plain = build_run(tmp_path / "plain", *fixed, "dataloader.side_stream=false")
    assert fit(beside) == fit(plain) == "finished"
    assert same_bits(beside.model.state_dict(), plain.model.state_dict())


@pytest.mark.gpu
def test_memory_of_a_batch_is_not_filled_anew_while_it_may_be_read() -> None:
    """That of a batch with a `to` of its own neither."""
    program = [sys.executable, str(ROOT / "tests" / "support" / "stream_races.py")]
    done = subprocess.run(
        program,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_a_side_stream_is_never_waited_for_by_the_host(tmp_path: Path, no_waits: Any) -> None:
    run = build_run(tmp_path, *ALL, "device=cuda", "dataloader=plain", "dataloader.pin=true")
    batches = run.train_loader.steps(0, 10)
    next(batches)
    with no_waits():
        assert len(list(batches)) == 9


# Memory that is shared.


def shares_memory(tensor: Tensor, array: np.ndarray) -> bool:
    return tensor.data_ptr() == array.ctypes.data


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_arrays_are_not_copied(dtype: Any) -> None:
    array = np.ones((4, 8, 8, 3), dtype)
    inputs, images = arrays.as_inputs(array, "")
    assert images is (dtype == np.uint8)
    assert shares_memory(inputs, array)


def test_targets_are_not_copied() -> None:
    inputs, labels = np.ones((4, 3), np.float32), np.arange(4)
    tensor, targets, _ = arrays._tensors(inputs, labels, Path("mine.npz"), "train")
    assert shares_memory(tensor, inputs)
    assert shares_memory(targets, labels)


def test_channels_first_and_read_only_arrays_are_copied() -> None:
    first = np.ones((4, 3, 8, 8), np.uint8)
    inputs, _ = arrays.as_inputs(first, "")
    assert inputs.shape == (4, 8, 8, 3)
    assert inputs.is_contiguous()
    locked = np.ones((4, 3), np.float32)
    locked.flags.writeable = False
    assert not shares_memory(arrays.as_inputs(locked, "")[0], locked)
    assert not shares_memory(as_tensor(locked), locked)


def test_digits_share_their_archive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The samples read are those trained on, but for the split."""
    made: list[np.ndarray] = []
    from_numpy = torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", lambda array: made.append(array) or from_numpy(array))
    from ptfast.core.durations import Duration
    from ptfast.data.sources.digits import Digits

    splits = Digits().load(val=Duration(0, "samples"), seed=0)
    source: Any = splits.train
    assert any(shares_memory(source.inputs, array) for array in made)


def test_windows_of_text_are_one_gather() -> None:
    tokens = np.arange(40)
    inputs, targets = Windows(tokens, 4).fetch(np.array([0, 2]))
    assert inputs.tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert torch.equal(targets, inputs + 1)
