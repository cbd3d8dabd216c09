"""How samples reach the training loop."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from ptfast.core import devices
from ptfast.core.errors import ConfigError, MachineError, PtfastError
from ptfast.core.machine import usable_cores
from ptfast.core.sections.given import is_ours
from ptfast.core.sections.section import Count, Family, Natural, OrAuto, Section, Technique, Unused
from ptfast.data import DataSection
from ptfast.data.sampling import Sampling
from ptfast.techniques.backend import Backend


class Dataloader(Section):
    """How samples reach the training loop."""

    kind: Literal["auto", "plain", "workers", "memory", "device", "packed"] = "auto"
    """Who reads: this process, workers, memory or device once, or a pack; `auto` takes the quickest."""
    workers: Natural | OrAuto = "auto"
    """Worker processes of each rank."""
    prefetch: Count = 2
    """Batches that each worker reads ahead."""
    pin: bool | OrAuto = "auto"
    """Page-locked memory, from which copies to the GPU run beside the training."""
    side_stream: bool = True
    """Copy the next batch to a CUDA device while this one trains, on a stream of its own."""
    fused: bool = True
    """Gather, change and normalise images on a CUDA device in one kernel, by Triton."""
    read_ahead: bool = False
    """Read the next batch in a thread while this one trains, on a CPU."""
    last: Literal["auto", "keep", "drop", "pad"] = "auto"
    """Treatment of an epoch's last, smaller batch: `pad` fills it from the epoch's start; `auto` keeps it,
    unless BatchNorm would get a single sample."""


FEW, FEW_PER_CORE = 64, 4
"""Threads or processes that any machine bears, and those that it bears for each core."""
PACK_FILES = ("manifest.json", "pack.unfinished")
"""One of which every pack has, finished or not."""


def data_of_a_pack(dataloader: Dataloader, data: DataSection) -> PtfastError | None:
    """Refuse data that is no pack for `dataloader.kind=packed`."""
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
    """Refuse pinned memory without a CUDA device, and a thread that reads ahead for a GPU."""
    if dataloader.pin is True and devices.usable_type(device) != "cuda":
        what = "pinned memory is for copies to a CUDA device, and none is used"
        hint = "Use dataloader.pin=auto"
        yield MachineError("E005", what, key="dataloader.pin", value=True, suggestion=hint)
    if dataloader.read_ahead and devices.usable_type(device) != "cpu":
        what = "reading ahead in a thread is for training on a CPU"
        hint = "Use dataloader.side_stream=true, which does the same for a GPU"
        yield ConfigError("C011", what, key="dataloader.read_ahead", value="true", suggestion=hint)


def thread_beside_own_order(dataloader: Dataloader, sampling: Sampling) -> PtfastError | None:
    """Refuse a thread beside an order of the user's, which may draw from the training's generators."""
    target = sampling.target
    if not dataloader.read_ahead or target is None or is_ours(target.path):
        return None
    what, hint = f"a thread would ask {target.path} for its order", "Use dataloader=workers"
    return ConfigError("C011", what, key="dataloader.read_ahead", value="true", suggestion=hint)


def crowded_cores(dataloader: Dataloader, backend: Backend) -> Iterator[PtfastError]:
    """Refuse threads and processes in numbers that exhaust a machine before they train."""
    cores, workers, threads = usable_cores(hyperthreads=True), dataloader.workers, backend.threads
    for key, number, fewer in (
        ("dataloader.workers", workers, "auto"),
        ("backend.threads", threads, "auto"),
        ("backend.worker_threads", backend.worker_threads, 1),
    ):
        if isinstance(number, int) and number > max(FEW, FEW_PER_CORE * cores):
            what = f"this machine has {cores} cores"
            yield MachineError("E005", what, key=key, value=number, suggestion=f"Use {key}={fewer}")


_loader = partial(Technique, kind="exact", off=("dataloader=plain",), alternatives="dataloader")

TECHNIQUES: tuple[Technique, ...] = (
    _loader(
        name="data in memory",
        on=("dataloader=memory",),
        why="Samples are decoded once; then a batch is one gather instead of a read and a decode per sample.",
        claim="Nothing is read or decoded after the first epoch.",
        source="Common practice, such as torch.utils.data.TensorDataset.",
        measured="A step of a small MLP in 254 us, against 667 us with a DataLoader over samples.",
        command="python scripts/bench_overhead.py --hidden 1",
        avoid="The data takes more than half of the free memory, or changes during training.",
        audit="A DataLoader over a dataset whose files would fit into memory.",
        about=("dataloader/auto",),
        trial=("model=mlp", "model.hidden=[16]"),
    ),
    _loader(
        name="augmented batches from memory",
        on=("dataloader=memory",),
        why="Each row of a crop is a contiguous run of bytes in a padded copy: a whole batch is one gather.",
        claim="No call per image; no figure by others is known.",
        source="A gather over numpy's sliding_window_view.",
        measured="Images of 32 x 32 cropped, flipped and normalised in 2.35 us each, against 170 us with "
        "torchvision on PIL images.",
        command="python scripts/bench_data.py crops",
        avoid="The images fill half of the free memory: padded and mirrored copies take twice as much.",
        audit="Random crops and flips are drawn image by image in __getitem__.",
        trial=("augment=crop_flip", "model=mlp", "model.hidden=[16]"),
        alternatives=None,
    ),
    _loader(
        name="data on the device",
        kind="reordered",
        on=("dataloader=device",),
        why="The dataset lives on the device, normalised where there is room: a batch is one gather, many "
        "steps at a time, and only the epoch's order crosses the bus.",
        claim="Part of what takes CIFAR-10 to 94 % in 2.59 s on one A100; no figure for it alone.",
        source="KellerJordan/cifar10-airbench.",
        avoid="The data takes more than half of the free device memory, or training needs that memory; on a "
        "CPU use dataloader=memory.",
        audit="A GPU that waits for a loader of images that would fit into its memory.",
        needs=("cuda",),
        trial=("augment=crop_flip", "model=mlp", "model.hidden=[16]"),
    ),
    Technique(
        name="one kernel for a batch of images",
        kind="exact",
        on=("dataloader.fused=true",),
        why="Bytes on the device are read once, cropped, mirrored, recolored, cut out and normalised in "
        "registers, and written once in the model's type.",
        claim="One kernel, or two with colors, for some tens; no figure by others is known.",
        source="Tillet, Kung, Cox 2019, 'Triton', MAPL.",
        avoid="Runs of seconds: the kernel is compiled when data is first on this machine's device.",
        audit="Tens of short kernels between two steps, in a trace of data that lives on the device.",
        needs=("cuda", "images"),
        trial=("dataloader=device", "augment=cutout", "model=resnet_digits"),
    ),
    _loader(
        name="data in a pack",
        on=("dataloader=packed",),
        why="Decoded samples are stored on disk in the layout the model takes and read by memory mapping: "
        "training starts at once, at any data size, and nothing is decoded.",
        claim="No decoding, whatever the format; no figure by others is known.",
        source="Common practice, such as FFCV and memory-mapped arrays.",
        measured="JPEG files of 500 x 400 to random crops of 224, as bytes: 142 us each out of a pack at a "
        "shorter side of 256, against 884 us from the files and 2,199 us by PIL with torchvision's "
        "transforms.",
        command="python scripts/bench_data.py jpeg",
        avoid="The disk has no room for the pixels, or the data changes often. With --size the pack is "
        "different data, whose accuracy has to be checked.",
        audit="Files that are decoded anew in every epoch and do not fit into memory.",
        needs=("pack",),
        trial=("data=imagefolder", "data.root={pack}", "model=mlp", "model.hidden=[16]", "batch_size=8"),
    ),
    _loader(
        name="worker processes",
        on=("dataloader=workers", "dataloader.workers=2"),
        off=("dataloader=plain", "dataloader.workers=auto"),
        why="Other cores read, decode and augment the next batches during the training step.",
        claim="The training does not wait for its data, where cores are spare; the guide gives no figure.",
        source="PyTorch Performance Tuning Guide, 'Enable asynchronous data loading and augmentation'.",
        measured="Samples of 20 ms for steps of 40 ms, on two cores: 334 samples/s with 8 workers and 43 "
        "without. resnet_digits, in memory: 7,180 to 7,930 with workers and 10,030 without.",
        command="python scripts/bench_find_workers.py",
        avoid="No core is free, or samples are already in memory: then handing batches over only costs time.",
        audit="num_workers=0 while the device waits for data.",
        about=("dataloader/auto",),
        needs=("cores",),
        trial=("model=mlp", "model.hidden=[16]"),
    ),
    _loader(
        name="reading ahead in a thread",
        on=("dataloader.read_ahead=true",),
        off=("dataloader.read_ahead=false",),
        why="Decoding and gathering release the interpreter lock, so a thread can prepare the next batch.",
        claim="As much as reading takes, where a core is idle.",
        source="NVIDIA apex's data_prefetcher does the same on a GPU.",
        measured="It costs nothing itself: 70 us of processor time for a JPEG of 32 x 32, 72 us without.",
        command="python scripts/bench_data.py loaders",
        avoid="All cores are busy, or samples are already in memory.",
        audit="A CPU that reads and trains by turns while a core is idle.",
        needs=("cores",),
        trial=("dataloader=plain", "model=mlp", "model.hidden=[16]"),
        alternatives=None,
    ),
    Technique(
        name="full last batch",
        kind="training",
        on=("dataloader.last=pad",),
        off=("dataloader.last=keep",),
        why="Every step has the same shape, so kernels are searched or compiled once, and BatchNorm never "
        "sees a tiny batch.",
        claim="Saves the compilation, the capture or the search for kernels that another size would cost.",
        source="PyTorch documentation of DistributedSampler, which fills up the same way.",
        avoid="Every sample should count equally: the first samples of an epoch are repeated at its end.",
        audit="A compiled model whose last batch of an epoch is smaller than the others.",
        trial=("model=mlp", "model.hidden=[16]", "optimizer.lr=0.01"),
    ),
    Technique(
        name="shards read nearly in order",
        kind="training",
        on=("data.shuffle_buffer=1000",),
        off=("data.shuffle_buffer=null",),
        why="Reads stay within a few shards at a time, which slow disks and network storage serve faster "
        "than random access.",
        claim="Large sequential reads instead of small random ones, on rotating and network disks; nothing "
        "where the shards lie in memory already.",
        source="WebDataset's documentation of why data is kept in tar shards.",
        avoid="The disk is fast at random reads, or shards are sorted by class: the order is less random.",
        audit="Samples of tar shards on a network disk are read in an order drawn over all of them.",
        trial=(
            *("data=webdataset", "data.shards={shards}", "data.val_shards={shards}", "batch_size=10"),
            *("model=mlp", "model.hidden=[16]", "optimizer.lr=0.01"),
        ),
    ),
    Technique(
        name="pinned memory",
        family="transfers",
        kind="exact",
        on=("dataloader.pin=true",),
        why="Copies overlap with kernels only from page-locked memory.",
        claim="Hides the copy behind the step; worth what copies take, so most for images in float32.",
        source="PyTorch tutorial 'A guide on good usage of non_blocking and pin_memory()'.",
        avoid="The host is short of memory, since pinned pages cannot be swapped out.",
        audit="A DataLoader without pin_memory, or .to(device) without non_blocking, before a GPU.",
        needs=("cuda",),
        trial=("dataloader=plain", "model=mlp", "model.hidden=[16]"),
    ),
    Technique(
        name="transfers on a side stream",
        family="transfers",
        kind="exact",
        on=("dataloader.side_stream=true", "dataloader.pin=true"),
        off=("dataloader.side_stream=false", "dataloader.pin=false"),
        why="The next batch is copied while the current one trains, instead of before it.",
        claim="Hides a copy behind the step, up to all of it; most for large inputs, such as images.",
        source="CUDA C++ Programming Guide, 'Overlap of Data Transfer and Kernel Execution'.",
        avoid="Device memory has no room for one more batch.",
        audit="Batches are moved by .to(device) at the start of the step that uses them.",
        needs=("cuda",),
        trial=("dataloader=plain", "model=mlp", "model.hidden=[16]"),
    ),
    Technique(
        name="tensors made on the device",
        family="transfers",
        kind="exact",
        why="A tensor created on the host and then moved costs an allocation, a copy and often a wait.",
        claim="One copy less for each such tensor and step, and one wait where its memory is not pinned.",
        source="PyTorch Performance Tuning Guide, 'Create tensors directly on the target device'.",
        avoid="Never.",
        audit="torch.zeros(...).to(device), torch.tensor(...).cuda() and the like in what runs every step.",
    ),
    Technique(
        name="arrays without a copy",
        family="transfers",
        kind="exact",
        why="as_tensor and from_numpy share the array's memory; torch.tensor copies it.",
        claim="One copy of the data less in memory and in time.",
        source="PyTorch documentation of torch.from_numpy and torch.as_tensor.",
        avoid="The array is written to while the tensor is in use.",
        audit="torch.tensor(array) in a dataset or in a collate function.",
    ),
)

FAMILY = Family(
    name="dataloader",
    rules=(data_of_a_pack, thread_beside_own_order),
    machine_rules=(transfers_of_the_device, crowded_cores),
    unused=(
        Unused.unless(
            "dataloader.kind",
            ("workers", "auto"),
            *("dataloader.workers", "dataloader.prefetch", "backend.worker_threads"),
        ),
    ),
    free_keys=tuple(
        f"dataloader.{name}" for name in ("kind", "workers", "prefetch", "pin", "read_ahead", "fused")
    ),
    panel=lambda resolved: {
        "images": "gathered, changed and normalised in one kernel" if resolved.fused_images else None,
        "transfers": "on a side stream, one batch ahead" if resolved.side_stream else None,
        "reading": "by a thread, one batch ahead" if resolved.read_ahead else None,
    },
    techniques=TECHNIQUES,
)
