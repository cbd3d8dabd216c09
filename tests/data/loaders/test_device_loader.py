"""The loader `device`: the batches of the others, from data that lies where the model is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from resuming import Armed, arm, assert_same_run, train_in_child
from running import WITH_TESTS, build_run, train
from test_augment import EVERYTHING
from test_loaders import BOTH, NONE, REFLECTED, color, loader, same

from ptfast.core.auto_choices import read_choices
from ptfast.core.batch_plan import DropLast
from ptfast.core.errors import ConfigError, DataError, MachineError
from ptfast.core.protocols import DataInfo, StepBatch
from ptfast.core.tensors.torch_internals import DispatchMode
from ptfast.data.build_data import Data
from ptfast.data.loaders import device_loader, pipeline
from ptfast.data.map_source import MapSource, TensorSource

__all__ = ["Armed", "color"]
ALL = {**BOTH, "cutout": 3, "brightness": 0.4, "contrast": 0.4, "rotation_degrees": 10, "scaling": 0.1}
SMALL = ("model.hidden=[16]", "batch_size=128", "steps=30", "log_every=5", "saving.every=10steps")


@pytest.mark.parametrize("augment", [NONE, BOTH, REFLECTED, {"flip": "alternating"}, ALL])
@pytest.mark.parametrize("channels_last", [False, True])
def test_it_gives_the_batches_of_the_others(color: Data, augment: dict[str, Any], channels_last: bool):
    words: dict[str, Any] = {"augment": augment, "channels_last": channels_last, "micro_batches": 3}
    here = loader(color, "device", **words)
    assert (here.kind, here.workers) == ("device", 0)
    # Over the ends of two epochs.
    assert close(loader(color, "plain", **words).steps(2, 12), here.steps(2, 12)) == 10


def close(one: Iterator[StepBatch], other: Iterator[StepBatch]) -> int:
    """Assert that two streams have the same pixels, to rounding, in the same layout; return their length."""
    count = 0
    for a, b in zip(one, other, strict=True):
        assert a.num_samples == b.num_samples
        for (data_a, num_a), (data_b, num_b) in zip(a.micro_batches, b.micro_batches, strict=True):
            assert num_a == num_b
            torch.testing.assert_close(data_a[0], data_b[0])
            assert data_a[0].stride() == data_b[0].stride()
            assert torch.equal(data_a[1], data_b[1])
        count += 1
    return count


@pytest.mark.gpu
def test_the_data_takes_no_pinned_memory() -> None:
    info = DataInfo(kind="features", task="classification", num_classes=2)
    source = TensorSource(torch.ones(3000, 2500), torch.arange(3000) % 2)
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    here = loader(Data(info, source, None, None, ""), "device", device=torch.device("cuda"), normalize=False)
    assert torch.equal(next(here.steps(0, 1)).micro_batches[0].data[0].cpu(), torch.ones(24, 2500))
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) - before < 2**20


CUT = {"flip": True, "cutout": 3}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("augment", [NONE, BOTH, REFLECTED, CUT], ids=["none", "both", "reflected", "cut"])
def test_pixels_that_are_ready_beforehand_have_the_same_bits(
    color: Data, augment: dict[str, Any], channels_last: bool, monkeypatch: pytest.MonkeyPatch
):
    """In float32 and in a half type, and where there is no room for them."""
    words: dict[str, Any] = {"augment": augment, "channels_last": channels_last, "micro_batches": 2}
    for room, kind in ((0.125, torch.float32), (0.0, torch.float32), (0.125, torch.bfloat16)):
        monkeypatch.setattr(device_loader, "READY_SHARE", room)
        here = loader(color, "device", input_type=kind, **words)
        assert here.batches._ready == (room > 0)
        for one, other in zip(here.steps(2, 8), loader(color, "plain", **words).steps(2, 8), strict=True):
            for (data, _), (expected, _) in zip(one.micro_batches, other.micro_batches, strict=True):
                assert data[0].dtype == kind
                assert torch.equal(data[0], expected[0].to(kind))
                assert data[0].stride() == expected[0].stride()


class Operations(DispatchMode):
    """The operators that made something, and were no views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(returned.alias_info for returned in func._schema.returns):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_batch_is_one_gather_of_its_images_and_one_of_its_targets(color: Data, channels_last: bool):
    how: dict[str, Any] = {"channels_last": channels_last, "input_type": torch.bfloat16}
    here = loader(color, "device", augment=BOTH, **how)
    here.batches._chunk_steps = 1
    steps = here.steps(0, 4)
    next(steps)
    with Operations() as operations:
        next(steps)
    assert operations.names == ["index", "index_select"]


def test_several_chunks_and_ranks_are_cut_alike(color: Data, monkeypatch: pytest.MonkeyPatch):
    whole = list(loader(color, "plain", micro_batches=4, augment=ALL).steps(0, 11))
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", 2 * 24 * 180 * 4)
    for rank in (0, 1):
        here = loader(color, "device", micro_batches=4, augment=ALL, rank=rank, world_size=2)
        assert here.batches._chunk_steps == 2
        mine = [
            StepBatch(step.micro_batches[2 * rank : 2 * rank + 2], step.num_samples) for step in whole[3:]
        ]
        assert close(iter(mine), here.steps(3, 11)) == 8


def test_starting_at_any_step_gives_the_batches_of_an_unbroken_run(color: Data):
    whole = list(loader(color, "device", augment=ALL).steps(0, 13))
    assert same(iter(whole[7:]), loader(color, "device", augment=ALL).steps(7, 13)) == 6


@pytest.mark.parametrize("drop_last", [True, "pad"])
def test_the_end_of_an_epoch_is_that_of_the_others(color: Data, drop_last: DropLast):
    words: dict[str, Any] = {"augment": BOTH, "drop_last": drop_last, "micro_batches": 2}
    assert close(loader(color, "plain", **words).steps(2, 11), loader(color, "device", **words).steps(2, 11))


def test_features_lie_there_too():
    info = DataInfo(kind="features", task="classification", num_classes=2)
    generator = torch.Generator().manual_seed(0)
    source = TensorSource(torch.randn(50, 4, generator=generator), torch.arange(50) % 2)
    data = Data(info, source, None, None, "")
    assert same(loader(data, "plain").steps(0, 5), loader(data, "device").steps(0, 5)) == 5


def test_what_is_read_sample_by_sample_is_read_once(color: Data):
    class Files(MapSource):
        images = True
        num_read = 0

        def __len__(self) -> int:
            return 100

        def fetch(self, indices: Any, epoch: int = 0) -> Any:
            Files.num_read += len(indices)
            return color.train.fetch(indices)

    files = Data(color.info, Files(), None, None, "")
    assert same(loader(color, "device").steps(0, 9), loader(files, "device").steps(0, 9)) == 9
    assert Files.num_read <= 101, "all of them once, and one for its shape"


def test_nothing_is_copied_within_an_epoch(color: Data, monkeypatch: pytest.MonkeyPatch):
    here = loader(color, "device", augment=ALL)
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", 1)
    here.batches._chunk_steps = 1
    batches = here.steps(0, 10)
    next(batches)
    monkeypatch.setattr(here.batches._prepare, "move", lambda value: pytest.fail("copied"))
    for _ in range(4):
        next(batches)
    with pytest.raises(pytest.fail.Exception, match="copied"):
        next(batches)


def test_no_room_is_one_error(color: Data, monkeypatch: pytest.MonkeyPatch):
    # 100 images of 10 x 14 with their padding, and labels.
    needed = 100 * 10 * 14 * 3 + 800
    monkeypatch.setattr(device_loader, "free_bytes", lambda _: 2 * needed)
    loader(color, "device", augment=BOTH)
    monkeypatch.setattr(device_loader, "free_bytes", lambda _: 2 * needed - 1)
    with pytest.raises(MachineError, match=r"dataloader\.kind=device: the data takes .* on cpu") as caught:
        loader(color, "device", augment=BOTH)
    assert caught.value.code == "E005"
    assert "dataloader=memory" in (caught.value.suggestion or "")


class Ragged(MapSource):
    def __len__(self) -> int:
        return 2000

    def fetch(self, indices: Any, epoch: int = 0) -> Any:
        return torch.zeros(len(indices), 1 + int(indices[0] > 0)), torch.zeros(len(indices)).long()


def test_samples_of_many_shapes_are_refused():
    info = DataInfo(kind="features", task="classification", num_classes=2)
    with pytest.raises(DataError, match=r"dataloader: samples that are not .* of one shape"):
        loader(Data(info, Ragged(), None, None, ""), "device")
    Ragged.storage = "memory"
    with pytest.raises(ConfigError, match=r"dataloader\.kind=device: only samples of one shape"):
        loader(Data(info, Ragged(), None, None, ""), "device")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_killed_run_ends_with_the_same_bits(in_tmp: Path) -> None:
    armed = "callbacks=[{_target_: resuming.Armed, step: 22}]"
    words = (*EVERYTHING, *SMALL, armed, "run.resume=auto", "dataloader=device")
    assert train(*words, "run.dir=whole") == 0
    arm("SIGKILL")
    assert train_in_child(*words, "run.dir=killed") == -signal.SIGKILL
    assert train(*words, "run.dir=killed") == 0
    assert_same_run(Path("whole"), Path("killed"))


def test_it_is_shown_and_remembered(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*SMALL[:2], "steps=2", "dataloader=device", "run.dir=run") == 0
    assert "device (as the config says)" in " ".join(capsys.readouterr().out.split())
    assert read_choices(in_tmp / "run")["dataloader.kind"].value == "device"


@pytest.mark.gpu
def test_batches_are_made_on_the_gpu(tmp_path: Path, no_waits: Any) -> None:
    words = ("model.hidden=[16]", "batch_size=96", *EVERYTHING, "device=cuda")
    there = build_run(tmp_path / "there", *words, "dataloader.kind=device").train_loader
    plain = build_run(tmp_path / "plain", *words, "dataloader.kind=plain").train_loader
    for one, other in zip(there.steps(10, 19), plain.steps(10, 19), strict=True):
        (inputs, targets), (expected, labels) = one.micro_batches[0].data, other.micro_batches[0].data
        assert inputs.is_cuda
        assert torch.equal(targets, labels)
        # A turned pixel may lie at the edge between two values.
        assert float((inputs != expected).float().mean()) < 0.001
    batches = there.steps(0, 14)
    next(batches)
    torch.cuda.synchronize()
    # From here on the host asks for kernels and waits for none.
    with no_waits():
        assert len(list(batches)) == 13


COLOURS = {"brightness": 0.4, "contrast": 0.9, "saturation": 0.5}
FUSED: dict[str, dict[str, Any]] = {
    "crops": BOTH,
    "reflected": {**REFLECTED, **COLOURS},
    "cut": {**BOTH, **COLOURS, "cutout": 4},
}


@pytest.mark.slow
def test_one_kernel_gives_the_bits_of_single_operators() -> None:
    """By Triton's interpreter, whose bfloat16 is not rounded as a GPU's."""
    pytest.importorskip("triton")
    cases = [
        {"augment": augment, "channels": channels, "channels_last": last, "room": 0.0, "input_type": kind}
        for augment, channels, last, kind in (
            (FUSED["crops"], 3, False, "float32"),
            (FUSED["reflected"], 1, True, "float32"),
            (FUSED["cut"], 3, True, "float16"),
            (FUSED["cut"], 4, False, "float32"),
        )
    ]
    # Pixels that are normalized beforehand.
    cases.append({**cases[0], "augment": CUT, "room": 0.125})
    script = ROOT / "tests" / "support" / "interpreted.py"
    environment = {**os.environ, **WITH_TESTS, "TRITON_INTERPRET": "1"}
    command = [sys.executable, script, json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu("triton")
@pytest.mark.parametrize("augment", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_one_kernel_gives_the_bits_on_a_gpu(
    color: Data,
    augment: dict[str, Any],
    channels_last: bool,
    kind: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_loader, "READY_SHARE", 0.0)
    how: dict[str, Any] = {"augment": augment, "channels_last": channels_last, "input_type": kind}
    how["device"] = torch.device("cuda", 0)
    fused, plain = (loader(color, "device", fused=each, **how) for each in (True, False))
    assert (fused.batches.fused, plain.batches.fused) == (True, False)
    for one, other in zip(fused.steps(0, 9), plain.steps(0, 9), strict=True):
        images, expected = one.micro_batches[0].data[0], other.micro_batches[0].data[0]
        assert torch.equal(images, expected)
        assert images.stride() == expected.stride()
