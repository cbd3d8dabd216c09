"""Random crops and flips of 32 x 32 images from memory, in batches of 512"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_bench import Row

NUM_IMAGES = 50_000
BATCH_SIZE = 512
ONE_BY_ONE = 4 * BATCH_SIZE
"""Images a round of the rows that take them one by one."""
MEAN, STD = [125.3, 123.0, 113.9], [63.0, 62.1, 66.7]


def build(folder: Path) -> list[Row]:
    from ptfast.core.batch_plan import BatchPlan
    from ptfast.data.sampling.sampler import Sampler, Sharding
    from ptfast.data.transforms.augment_plan import build_augment
    from ptfast.data.transforms.row_windows import MemoryBatches

    data, crop_flip = noise(), {"crop_padding": 4, "flip": True}
    augment = build_augment(crop_flip, data.info, images=True, task_name="auto", normalize=True)
    sharding = Sharding(BatchPlan(NUM_IMAGES, BATCH_SIZE), 1)
    raw, sampler, epoch = MemoryBatches(data.train, augment), Sampler(sharding, seed=0), 0

    def bytes_only() -> int:
        nonlocal epoch
        epoch += 1
        steps = sampler.plan.steps_per_epoch or 1
        for step in range((epoch - 1) * steps, epoch * steps):
            (share,), _ = sampler.step(step)
            raw(share)
        return NUM_IMAGES

    return [
        Row("DataLoader, torchvision v1 on PIL images", one_by_one(data, by_pil())),
        Row("DataLoader, torchvision v2 on tensors", one_by_one(data, by_v2())),
        Row("plain, float32 normalized", epochs(data, "plain", crop_flip)),
        Row("memory, float32 normalized", epochs(data, "memory", crop_flip)),
        Row("memory, uint8 for the device to normalize", bytes_only),
    ]


def noise() -> Any:
    """Images of random pixels, in memory."""
    from ptfast.core.protocols import DataInfo
    from ptfast.data.build_data import Data
    from ptfast.data.map_source import TensorSource

    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (NUM_IMAGES, 32, 32, 3), dtype=np.uint8)
    labels = generator.integers(0, 10, NUM_IMAGES)
    source = TensorSource(torch.from_numpy(images), torch.from_numpy(labels), images=True)
    info = DataInfo(
        kind="image",
        task="classification",
        num_classes=10,
        input_shape=(3, 32, 32),
        in_channels=3,
        extra={"normalize": {"mean": MEAN, "std": STD}},
    )
    return Data(info, source, None, None, "")


def epochs(data: Any, kind: str, augment: dict[str, Any]) -> Callable[[], int]:
    """Whole epochs as the training loop takes them, one a call."""
    from ptfast.core.batch_plan import BatchPlan
    from ptfast.data.loaders.build_loaders import build_train_loader
    from ptfast.data.loaders.pipeline import LoaderOptions
    from ptfast.data.sampling.sampler import Sharding
    from ptfast.data.transforms.augment_plan import build_augment

    sharding = Sharding(BatchPlan(len(data.train), BATCH_SIZE), 1)
    loading = LoaderOptions(torch.device("cpu"), channels_last=True, kind=kind)
    changes = build_augment(augment, data.info, images=True, task_name="auto", normalize=True)
    built = build_train_loader(data, sharding, loading, seed=0, augment=changes)
    steps, epoch = built.plan.steps_per_epoch or 1, 0

    def work() -> int:
        nonlocal epoch
        epoch += 1
        return sum(batch.num_samples for batch in built.steps((epoch - 1) * steps, epoch * steps))

    return work


def one_by_one(data: Any, transform: Callable[[np.ndarray], Any]) -> Callable[[], int]:
    """The first images through a DataLoader, each transformed by itself."""
    from torch.utils.data import DataLoader, Dataset

    class Samples(Dataset[Any]):
        def __len__(self) -> int:
            return ONE_BY_ONE

        def __getitem__(self, index: int) -> Any:
            return transform(images[index]), int(labels[index])

    images, labels = data.train.inputs.numpy(), data.train.targets.numpy()
    batches = DataLoader(Samples(), batch_size=BATCH_SIZE, shuffle=True)
    return lambda: sum(len(targets) for _, targets in batches)


def by_pil(*more: Any) -> Callable[[np.ndarray], Any]:
    """Crop, flip and `more`, on PIL images."""
    from PIL import Image
    from torchvision import transforms as T

    transform = T.Compose(
        [
            T.RandomCrop(32, padding=4),
            T.RandomHorizontalFlip(),
            *more,
            T.ToTensor(),
            T.Normalize([m / 255 for m in MEAN], [s / 255 for s in STD]),
        ]
    )
    return lambda pixels: transform(Image.fromarray(pixels))


def by_v2(*more: Any) -> Callable[[np.ndarray], Any]:
    """Crop, flip and `more`, on tensors."""
    from torchvision.transforms import v2 as T

    transform = T.Compose(
        [
            T.RandomCrop(32, padding=4),
            T.RandomHorizontalFlip(),
            *more,
            T.ToDtype(torch.float32, scale=True),
            T.Normalize([m / 255 for m in MEAN], [s / 255 for s in STD]),
        ]
    )
    return lambda pixels: transform(torch.from_numpy(pixels).permute(2, 0, 1))
