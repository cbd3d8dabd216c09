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
    from ptfast.data import Data, build_train_loader
    from ptfast.data.augment import build_augment
    from ptfast.data.batches import MemoryBatches
    from ptfast.data.sampler import Sampler
    from ptfast.data.source import TensorSource
    from ptfast.run import DataInfo

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
    crop_flip = {"crop_padding": 4, "flip": True}
    shared: dict[str, Any] = {"batch_size": BATCH_SIZE, "micro_batches": 1, "rank": 0, "num_ranks": 1}
    shared |= {"seed": 0, "last": "keep"}

    def loader(kind: str, **changes: Any) -> Callable[[], int]:
        """Whole epochs as the training loop takes them, one a call."""
        words: dict[str, Any] = {"augment": crop_flip, "normalize": True, "channels_last": True, **changes}
        words |= {"task_name": "auto", "workers": 0, "prefetch": 2, "pin": False}
        built = build_train_loader(
            Data(info, source, None, None, ""), kind=kind, device=torch.device("cpu"), **words, **shared
        )
        steps, epoch = built.plan.steps_per_epoch or 1, 0

        def work() -> int:
            nonlocal epoch
            epoch += 1
            return sum(batch.num_samples for batch in built.steps((epoch - 1) * steps, epoch * steps))

        return work

    augment = build_augment(crop_flip, info, images=True, task_name="auto", normalize=True)
    raw, sampler, epoch = MemoryBatches(source, augment, 0), Sampler(NUM_IMAGES, **shared), 0

    def bytes_only() -> int:
        nonlocal epoch
        epoch += 1
        steps = sampler.plan.steps_per_epoch or 1
        for step in range((epoch - 1) * steps, epoch * steps):
            (share,), _ = sampler.step(step)
            raw(share)
        return NUM_IMAGES

    return [
        Row("DataLoader, torchvision v1 on PIL images", _one_by_one(images, labels, _by_pil())),
        Row("DataLoader, torchvision v2 on tensors", _one_by_one(images, labels, _by_v2())),
        Row("plain, float32 normalised", loader("plain")),
        Row("memory, float32 normalised", loader("memory")),
        Row("memory, uint8 for the device to normalise", bytes_only),
    ]


def _one_by_one(
    images: np.ndarray, labels: np.ndarray, transform: Callable[[np.ndarray], Any]
) -> Callable[[], int]:
    from torch.utils.data import DataLoader, Dataset

    class Samples(Dataset[Any]):
        def __len__(self) -> int:
            return ONE_BY_ONE

        def __getitem__(self, index: int) -> Any:
            return transform(images[index]), int(labels[index])

    batches = DataLoader(Samples(), batch_size=BATCH_SIZE, shuffle=True)
    return lambda: sum(len(targets) for _, targets in batches)


def _by_pil() -> Callable[[np.ndarray], Any]:
    from PIL import Image
    from torchvision import transforms as T

    transform = T.Compose(
        [
            T.RandomCrop(32, padding=4),
            T.RandomHorizontalFlip(),
            T.ToTensor(),
            T.Normalize([m / 255 for m in MEAN], [s / 255 for s in STD]),
        ]
    )
    return lambda pixels: transform(Image.fromarray(pixels))


def _by_v2() -> Callable[[np.ndarray], Any]:
    from torchvision.transforms import v2 as T

    transform = T.Compose(
        [
            T.RandomCrop(32, padding=4),
            T.RandomHorizontalFlip(),
            T.ToDtype(torch.float32, scale=True),
            T.Normalize([m / 255 for m in MEAN], [s / 255 for s in STD]),
        ]
    )
    return lambda pixels: transform(torch.from_numpy(pixels).permute(2, 0, 1))
