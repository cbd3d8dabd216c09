"""Who loads: what `auto` becomes by size, memory and timing, kept on resuming; the same bits from all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from running import build_run, same_bits, train, weights
from torch.utils.data import Dataset

from ptfast.core.auto_choices import read_choices
from ptfast.core.errors import ConfigError, MachineError
from ptfast.data.loaders import loader_choice
from ptfast.data.loaders.loader_choice import Choice, SampleCost, choose, count_workers, time_samples
from ptfast.data.map_source import MapSource, TensorSource

MB = 10**6
GB = 10**9


class Files(MapSource):
    """Images that take a while to read."""

    images = repeatable = True

    def __init__(self, read_s: float, count: int = 1000, packed: bool = False) -> None:
        self.read_s, self.count, self.storage = read_s, count, "pack" if packed else "files"
        self.decoded_bytes_ = count * 3000

    def __len__(self) -> int:
        return self.count

    @property
    def decoded_bytes(self) -> int | None:
        return self.decoded_bytes_


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine of 4 cores and 8 GB, on which reading takes what the source says; or another."""

    def of(cores: int = 4, memory: int = 8 * GB, shared: int = 4 * GB) -> None:
        monkeypatch.setattr(loader_choice, "spare_cores", lambda: cores)
        monkeypatch.setattr(loader_choice, "available_memory", lambda: memory)
        monkeypatch.setattr(loader_choice, "shared_memory", lambda: shared)

    monkeypatch.setattr(
        loader_choice, "time_samples", lambda source: SampleCost(getattr(source, "read_s", 1e-4), 3000)
    )
    of()
    return of


def auto(source: MapSource, **given: Any) -> Choice:
    return choose(source, **{"kind": "auto", "micro_batch_size": 100, **given})


def test_what_is_in_memory_is_gathered_there() -> None:
    found = auto(TensorSource(torch.zeros(9, 3), torch.zeros(9)))
    assert found == Choice("memory", "the data is in memory", 0)


def test_files_that_fit_are_decoded_once() -> None:
    assert auto(Files(1e-4)) == Choice("memory", "2.9 MiB, decoded once", 0)


def test_the_other_splits_count(machine: Callable[..., None]) -> None:
    machine(memory=13 * MB)
    assert auto(Files(1e-4)).kind == "memory"
    assert auto(Files(1e-4), others=[Files(1e-4, 200)]).kind == "plain"


def test_a_run_that_is_over_sooner_does_not_decode_everything() -> None:
    assert auto(Files(1e-4), num_samples=999).kind == "workers"
    assert auto(Files(1e-4), num_samples=1000).kind == "memory"


def test_files_that_do_not_fit_are_read_by_workers_where_that_pays(machine: Callable[..., None]) -> None:
    machine(memory=4 * 4 * 2**28)
    large = Files(1e-4, 10**7)
    assert auto(large) == Choice("workers", "a batch is read in 10 ms", 3)
    assert auto(large, workers=2).workers == 2
    assert auto(Files(1e-5, 10**7)).kind == "plain"
    machine(cores=1, memory=4 * MB)
    assert auto(large).reason == "a batch is read in 10 ms, and cores or memory are not to spare"
    assert auto(large, workers=0).reason == "a batch is read in 10 ms, and there are no workers"


def test_a_pack_is_read_in_place_unless_reading_takes_long() -> None:
    quick = auto(Files(1e-6, packed=True))
    assert quick == Choice("packed", "read in place, 1 us a sample", 0)
    assert auto(Files(1e-3, 10**7, packed=True)).kind == "workers"


def test_originals_that_boxes_are_cut_out_of_count_as_large_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Files, "original_bytes", 2 * GB)
    assert auto(Files(1e-4), crops=True).reason == "1.9 GiB, decoded once"
    monkeypatch.setattr(Files, "original_bytes", 3 * GB)
    assert auto(Files(1e-4), crops=True).kind == "workers"
    assert auto(Files(1e-4)).kind == "memory"


def test_augmented_images_lie_on_a_gpu_that_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, images = torch.device("cuda"), TensorSource(torch.zeros(9, 8, 8, 3), torch.zeros(9), images=True)
    monkeypatch.setattr(loader_choice, "free_bytes", lambda device: 8 * 3 * MB)
    assert auto(Files(1e-4), device=gpu, augments=True).reason == "2.9 MiB, room on the GPU"
    assert auto(images, device=gpu, augments=True).kind == "device"
    assert auto(images, device=gpu).kind == "memory"
    assert auto(images, device=torch.device("cpu"), augments=True).kind == "memory"
    monkeypatch.setattr(loader_choice, "free_bytes", lambda device: 7 * 3 * MB)
    assert auto(Files(1e-4), device=gpu, augments=True).kind == "memory"


def test_samples_that_may_change_are_never_held() -> None:
    files = Files(1e-4)
    files.repeatable = False
    assert auto(files).kind == "workers"


def test_workers_are_as_many_as_cores_and_memory_allow(machine: Callable[..., None]) -> None:
    machine(cores=9)
    assert count_workers("auto") == 7
    assert count_workers(12) == 12
    machine(cores=9, memory=4 * 3 * 2**28)
    assert count_workers("auto") == 3
    assert count_workers("auto", 2**28) == 1
    # A container that shares 64 MB, say.
    machine(cores=9, shared=64 * MB)
    assert count_workers("auto", 10 * MB) == 3


def test_what_workers_pass_on_fits_into_what_is_shared(machine: Callable[..., None]) -> None:
    machine(cores=9, shared=5 * MB)
    # Two batches of 100 samples of 3 kB for each.
    assert auto(Files(1e-4), kind="workers").workers == 4
    assert auto(Files(1e-4, 10**7)).workers == 4


def test_a_look_tells_the_size_of_what_is_handed_over() -> None:
    source = TensorSource(torch.zeros(9, 5), torch.zeros(9, dtype=torch.int64))
    assert time_samples(source).num_bytes == 5 * 4 + 8
    assert 0 < time_samples(source).seconds < 1


def test_workers_asked_for_by_name_are_at_least_one(machine: Callable[..., None]) -> None:
    machine(cores=1)
    assert auto(Files(1e-4), kind="workers").workers == 1
    assert auto(Files(1e-4), kind="workers", workers=0).workers == 0


def test_what_the_memory_does_not_hold_is_refused(machine: Callable[..., None]) -> None:
    machine(memory=2 * MB)
    with pytest.raises(
        MachineError, match=r"takes 2.9 MiB of memory, and 1.9 MiB are free.*dataloader=workers"
    ):
        auto(Files(1e-4), kind="memory")
    # A run that chose memory by itself goes on without.
    assert auto(Files(1e-4), kind="memory", before="2.9 MiB, decoded once").kind == "plain"


def test_data_that_is_not_packed_is_refused_where_a_pack_is_meant() -> None:
    with pytest.raises(ConfigError, match=r"the data is not a pack.*ptfast pack SRC DST"):
        auto(Files(1e-4), kind="packed")
    assert auto(Files(1e-4, packed=True), kind="packed").reason == "as the config says"


# Whole runs.


@pytest.fixture
def folder(in_tmp: Path) -> str:
    """Class folders of images of 8 x 8."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 40), ("val", 6)):
        for name in ("cat", "dog"):
            (in_tmp / "images" / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(in_tmp / "images" / split / name / f"{i:02}.png")
    return "images"


WORDS = ("data=imagefolder", "data.root=images", "batch_size=16", "epochs=1", "model=resnet_digits")
KINDS = {
    "memory": ("dataloader=memory",),
    **{f"{n} workers": ("dataloader=workers", f"dataloader.workers={n}") for n in (0, 1, 2, 4)},
}


@pytest.mark.usefixtures("folder")
def test_an_epoch_gives_the_same_weights_whoever_loads(in_tmp: Path) -> None:
    words = (*WORDS, "augment=crop_flip", "gradients.accumulate=2")
    assert train(*words, "run.dir=plain", "dataloader=plain") == 0
    for name, kind in KINDS.items():
        assert train(*words, f"run.dir={name.replace(' ', '-')}", *kind) == 0
        assert same_bits(weights(in_tmp / name.replace(" ", "-")), weights(in_tmp / "plain")), name


def test_ranks_of_a_machine_hold_images_once(two_ranks: dict[str, Any]) -> None:
    held = two_ranks["held"]
    notes = {
        "together": "; in memory once for 2 ranks",
        "without a map": "; in memory of each of 2 ranks (Permission denied)",
    }
    for name, note in notes.items():
        assert same_bits(held[name]["weights"], held["apart"]["weights"]), name
        assert held[name]["note"].endswith(note)
    assert held["apart"]["note"].endswith("val")
    assert held["seen"] == [(7, "by rank 0", True)] * 2
    assert held["kept"] == 7
    assert held["agree"] == [False, True]


@pytest.mark.usefixtures("folder")
def test_the_choice_is_written_down_with_its_reason_and_kept(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*WORDS, "run.dir=a", "dataloader=auto") == 0
    line = "dataloader.kind=memory because 17 KiB, decoded once"
    assert capsys.readouterr().out.count(line) == 1
    assert str(read_choices(in_tmp / "a")["dataloader.kind"]) == line

    def costs(source: MapSource) -> SampleCost:
        raise AssertionError("looked at again")

    monkeypatch.setattr(loader_choice, "time_samples", costs)
    run = build_run(in_tmp / "a", *WORDS, "dataloader=auto")
    assert (run.train_loader.kind, run.train_loader.reason) == ("memory", "17 KiB, decoded once")


@pytest.mark.usefixtures("folder")
def test_a_run_goes_on_with_another_loader_as_if_nothing_was(in_tmp: Path) -> None:
    words = (*WORDS, "augment=crop_flip", "schedule=constant", "model.width=4", "saving.best=false")
    assert train(*words, "run.dir=whole", "epochs=2", "dataloader=memory") == 0
    assert train(*words, "run.dir=parts", "epochs=1", "dataloader=auto") == 0
    more = ("dataloader=workers", "dataloader.workers=1", "run.resume=auto")
    assert train(*words, "run.dir=parts", "epochs=2", *more) == 0
    assert same_bits(weights(in_tmp / "parts"), weights(in_tmp / "whole"))
    assert read_choices(in_tmp / "parts")["dataloader.kind"].value == "workers"


@pytest.mark.usefixtures("folder")
def test_statistics_are_the_same_bits_whoever_loads(in_tmp: Path) -> None:
    found = [
        build_run(in_tmp / kind, *WORDS, f"dataloader={kind}").info.extra["normalize"]
        for kind in ("memory", "plain")
    ]
    assert found[0] == found[1]


class Drawn(Dataset[Any]):
    """Vectors with noise from the global generator."""

    num_classes = 2

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), float(index)) + torch.rand(3), index % 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_set_of_their_own_draws_the_same_whoever_loads(in_tmp: Path, num_workers: int) -> None:
    words = ("data=custom", "data._target_=test_loader_choice.Drawn", "model.hidden=[4]", "epochs=1")
    kind = ("dataloader=workers", f"dataloader.workers={num_workers}")
    assert train(*words, "run.dir=plain", "dataloader=plain") == train(*words, "run.dir=other", *kind) == 0
    assert same_bits(weights(in_tmp / "plain"), weights(in_tmp / "other"))
