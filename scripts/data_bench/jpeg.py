"""JPEG files of 500x400 to random resized crops of 224, mirrored at random, in batches of 32."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_bench import Row
from data_bench._photos import write_photos
from ptfast.core.durations import Duration
from ptfast.data.loaders.pipeline import LoaderOptions, Prepare, RawBatches
from ptfast.data.packs.pack_sources import plan_images
from ptfast.data.packs.pack_writer import make
from ptfast.data.sampling.sampler import MicroBatchIndices
from ptfast.data.sources.image_files import ImagesInMemory
from ptfast.data.sources.imagefolder import ImageFolder
from ptfast.data.transforms.augment_plan import build_augment

NUM_FILES = 128
BATCH, SIZE, PACKED_SIZE = 32, 224, 256
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def build(folder: Path) -> list[Row]:
    """The rows, the first of which is PIL with torchvision's first transforms."""
    files, pack = folder / "files", folder / "pack"
    write_photos(files, NUM_FILES)
    make(plan_images(files, size=PACKED_SIZE, jpeg=False, skip_corrupt=False), pack, workers=1)
    on_device = "bytes, normalized on the device"
    return [
        Row("PIL, transforms v1, DataLoader", by_pil(files), note="float32"),
        Row("decode_jpeg, transforms v2, DataLoader", by_v2(files), note=on_device),
        Row("ptfast, files", by_ptfast(files), note=on_device),
        Row("ptfast, files, normalized on the host", by_ptfast(files, normalize=True), note="float32"),
        Row("ptfast, originals in memory", by_ptfast(files, hold=True), note=on_device),
        Row(f"ptfast, pack at {PACKED_SIZE}, the same boxes", by_ptfast(pack), note=on_device),
        Row(f"ptfast, pack at {PACKED_SIZE}, on the host", by_ptfast(pack, normalize=True), note="float32"),
    ]


def by_pil(files: Path) -> Callable[[], int]:
    """The loader of tutorials."""
    from torchvision.datasets import ImageFolder as Folder
    from torchvision.transforms import Compose, Normalize, RandomHorizontalFlip, RandomResizedCrop, ToTensor

    steps = [RandomResizedCrop(SIZE), RandomHorizontalFlip(), ToTensor(), Normalize(MEAN, STD)]
    return _epoch_of(Folder(str(files), Compose(steps)))


def by_v2(files: Path) -> Callable[[], int]:
    """The loader of torchvision's own guide to fast transforms."""
    import warnings

    from torchvision.datasets import ImageFolder as Folder
    from torchvision.io import decode_jpeg, read_file
    from torchvision.transforms.v2 import Compose, RandomHorizontalFlip, RandomResizedCrop

    warnings.filterwarnings("ignore", message="The image decoding")
    steps = Compose([RandomResizedCrop(SIZE, antialias=True), RandomHorizontalFlip()])
    return _epoch_of(Folder(str(files), steps, loader=lambda path: decode_jpeg(read_file(path))))


def by_ptfast(root: Path, *, normalize: bool = False, hold: bool = False) -> Callable[[], int]:
    """A loader's raw batches, as `plain` makes them and worker processes do; where told to, prepared too."""
    splits = ImageFolder(str(root), SIZE).load(val=Duration(0, "samples"), seed=0)
    source, info = ImagesInMemory(splits.train) if hold else splits.train, splits.info
    wanted = {"resized_crop": (0.08, 1.0), "resized_ratio": (3 / 4, 4 / 3), "flip": True}
    augment = build_augment(wanted, info, images=True, task_name="auto", normalize=True)
    batches, prepare = RawBatches(source, augment), _prepare(source, info)
    epochs, indices = count(), np.random.default_rng(0).permutation(NUM_FILES)

    def work() -> int:
        epoch = next(epochs)
        for start in range(0, NUM_FILES, BATCH):
            part = indices[start : start + BATCH]
            raw = batches(MicroBatchIndices(epoch, part, len(part)))
            if normalize:
                prepare(raw)
        return NUM_FILES

    return work


def _prepare(source: Any, info: Any) -> Prepare:
    statistics = {"mean": [255 * x for x in MEAN], "std": [255 * x for x in STD]}
    info.extra["normalize"] = statistics
    return Prepare(LoaderOptions(torch.device("cpu"), channels_last=True), info, images=source.images)


def _epoch_of(dataset: Any) -> Callable[[], int]:
    loader = torch.utils.data.DataLoader(dataset, BATCH, shuffle=True)
    return lambda: sum(len(images) for images, _ in loader)
