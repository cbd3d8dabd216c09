"""Random crops and flips of 32 x 32 JPEG files, in batches of 128, by every kind of loader"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_bench import Row

NUM_IMAGES, BATCH_SIZE = 4096, 128
CROP_FLIP = {"crop_padding": 4, "flip": True}


def build(folder: Path) -> list[Row]:
    from ptfast.data.packs.pack_sources import plan_images
    from ptfast.data.packs.pack_writer import make

    write(folder / "files")
    make(plan_images(folder / "files", size=None, jpeg=False, skip_corrupt=False), folder / "pack", 1)
    files, held, pack = (opened(folder / name, hold) for name, hold in WAYS)
    return [
        Row("DataLoader, torchvision's ImageFolder and v1", one_by_one(folder / "files")),
        Row("plain", epochs(loader(files, "plain"))),
        Row("workers, one process", epochs(loader(files, "workers"))),
        Row("packed", epochs(loader(pack, "packed"))),
        Row("memory", epochs(loader(held, "memory"))),
    ]


WAYS = (("files", False), ("files", True), ("pack", False))


def write(root: Path) -> None:
    """Two classes of JPEG files of about a kilobyte, as those of CIFAR-10 are."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        path = root / f"class_{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = generator.integers(0, 256, (10, 10, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((32, 32), Image.Resampling.BICUBIC).save(path, quality=95)


def opened(root: Path, hold: bool) -> Any:
    """The dataset, left where it is or decoded into memory."""
    from ptfast.core.durations import Duration
    from ptfast.data.build_data import build_data
    from ptfast.data.loaders.loader_choice import Choice
    from ptfast.data.sources.imagefolder import ImageFolder

    choice = Choice("memory" if hold else "plain", "", 0)
    nothing = Duration(0, "samples")
    return build_data(ImageFolder(str(root)), val=nothing, seed=0, task="auto", choose=lambda *splits: choice)


def loader(data: Any, kind: str) -> Any:
    """The training loader of one kind."""
    from ptfast.core.batch_plan import BatchPlan
    from ptfast.data.loaders.build_loaders import build_train_loader
    from ptfast.data.loaders.pipeline import LoaderOptions
    from ptfast.data.sampling.sampler import Sharding
    from ptfast.data.transforms.augment_plan import build_augment

    sharding = Sharding(BatchPlan(len(data.train), BATCH_SIZE), 1)
    loading = LoaderOptions(torch.device("cpu"), channels_last=True, kind=kind, workers=1)
    augment = build_augment(CROP_FLIP, data.info, images=True, task_name="auto", normalize=True)
    return build_train_loader(data, sharding, loading, seed=0, augment=augment)


def epochs(loader: Any) -> Callable[[], int]:
    """Whole epochs as the training loop takes them, one a call; the time to start processes is part of it."""
    steps, epoch = loader.plan.steps_per_epoch, 0

    def work() -> int:
        nonlocal epoch
        epoch += 1
        total = sum(batch.num_samples for batch in loader.steps((epoch - 1) * steps, epoch * steps))
        loader.close()
        return total

    return work


def one_by_one(root: Path) -> Callable[[], int]:
    """A quarter of an epoch as a tutorial reads it."""
    from torch.utils.data import DataLoader, Subset
    from torchvision import transforms as T
    from torchvision.datasets import ImageFolder

    steps = [T.RandomCrop(32, padding=4), T.RandomHorizontalFlip(), T.ToTensor()]
    dataset = ImageFolder(str(root), T.Compose([*steps, T.Normalize([0.5] * 3, [0.25] * 3)]))
    some = Subset(dataset, range(0, NUM_IMAGES, 4))
    return lambda: sum(len(labels) for _, labels in DataLoader(some, batch_size=BATCH_SIZE, shuffle=True))
