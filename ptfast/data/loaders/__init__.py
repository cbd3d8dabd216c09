"""How samples reach the training loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from ptfast.core import devices
from ptfast.core.errors import ConfigError, MachineError, PtfastError
from ptfast.core.machine import usable_cores
from ptfast.core.sections.section import Count, Family, Natural, OrAuto, Section, Unused
from ptfast.data import DataSection
from ptfast.techniques.backend import Backend


class Dataloader(Section):
    """How samples reach the training loop."""

    kind: Literal["auto", "plain", "workers", "memory", "device", "packed"] = "auto"
    """Loader: in-process, workers, cached in RAM or on the device, or a pack; `auto` takes the fastest."""
    workers: Natural | OrAuto = "auto"
    """Worker processes of each rank."""
    prefetch: Count = 2
    """Batches that each worker reads ahead."""
    pin: bool | OrAuto = "auto"
    """Read batches into page-locked memory, so that copies to the GPU overlap with training."""
    side_stream: bool = True
    """Copy the next batch to a CUDA device while this one trains, on a separate stream."""
    fused: bool = True
    """Gather, augment and normalize images on a CUDA device in one Triton kernel."""
    drop_last: bool | Literal["auto", "pad"] = "auto"
    """Leave out an epoch's last, smaller batch; `pad` fills it from the epoch's start; `auto` keeps it,
    unless BatchNorm would get a single sample."""


FEW, FEW_PER_CORE = 64, 4
"""Threads or processes accepted on any machine, and per core on larger ones."""
PACK_FILES = ("manifest.json", "pack.unfinished")
"""Every pack, finished or not, has one of these files."""


def data_of_a_pack(dataloader: Dataloader, data: DataSection) -> PtfastError | None:
    """Reject `dataloader.kind=packed` for data that is not a pack."""
    if dataloader.kind != "packed":
        return None
    target = data.target
    key = {
        "ptfast.data.sources.imagefolder.ImageFolder": "root",
        "ptfast.data.sources.text_dataset.TextFile": "path",
    }.get(target.path)
    if key is None:
        what, hint = "only image folders and text files are packed", "Use dataloader=auto"
        return ConfigError("C011", what, key="dataloader.kind", value="packed", suggestion=hint)
    path = Path(str(target.kwargs[key])).expanduser()
    # A missing or unfinished pack is reported when it is opened.
    if not path.exists() or any((path / name).is_file() for name in PACK_FILES):
        return None
    what, pack = f"data.{key}={path} is no pack", f"{path}-packed"
    hint = f"Make one with ptfast pack {path} {pack} and use data.{key}={pack}, or use dataloader=auto"
    return ConfigError("C011", what, key="dataloader.kind", value="packed", suggestion=hint)


def transfers_of_the_device(dataloader: Dataloader, device: str) -> Iterator[PtfastError]:
    """Reject pinned memory without a CUDA device."""
    if dataloader.pin is True and devices.usable_type(device) != "cuda":
        what = "pinned memory is for copies to a CUDA device, and none is used"
        hint = "Use dataloader.pin=auto"
        yield MachineError("E005", what, key="dataloader.pin", value=True, suggestion=hint)


def crowded_cores(dataloader: Dataloader, backend: Backend) -> Iterator[PtfastError]:
    """Reject so many threads or processes that they would exhaust the machine."""
    cores, workers, threads = usable_cores(hyperthreads=True), dataloader.workers, backend.threads
    for key, number, fewer in (
        ("dataloader.workers", workers, "auto"),
        ("backend.threads", threads, "auto"),
        ("backend.worker_threads", backend.worker_threads, 1),
    ):
        if isinstance(number, int) and number > max(FEW, FEW_PER_CORE * cores):
            what = f"this machine has {cores} cores"
            yield MachineError("E005", what, key=key, value=number, suggestion=f"Use {key}={fewer}")


FAMILY = Family(
    rules=(data_of_a_pack,),
    machine_rules=(transfers_of_the_device, crowded_cores),
    unused=(
        Unused.unless(
            "dataloader.kind",
            ("workers", "auto"),
            *("dataloader.workers", "dataloader.prefetch", "backend.worker_threads"),
        ),
    ),
    free_keys=tuple(f"dataloader.{name}" for name in ("kind", "workers", "prefetch", "pin", "fused")),
    panel=lambda choices: {
        "images": "changed and normalized in one kernel" if choices.get("dataloader.fused") else None,
        "transfers": "on a side stream, one batch ahead" if choices.get("dataloader.side_stream") else None,
    },
)
