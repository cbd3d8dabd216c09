"""The images of a script: read into memory, cropped and mirrored at random, normalised."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ptfast.data.sampling.counter_draws import CROP_X, CROP_Y, FLIP, integers
from ptfast.measure.eject.parts.script_order import SEED, VAL_SIZE, split_indices

DATA = "digits"
DATA_PATH = "digits.npz"
DEVICE = "cpu"
CHANNELS_LAST = True
MEAN, STD = (0.0,), (255.0,)
AUGMENTED = True
CROP_PADDING = 4
MIRRORED: bool | str = True


@dataclass
class Split:
    """Images (samples, height, width, channels), uint8, and their classes."""

    images: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)


def load_data() -> dict[str, Split]:
    """The splits, in memory."""
    splits = read_files()
    if VAL_SIZE:
        train, (kept, held_out) = splits["train"], split_indices(len(splits["train"]))
        splits["train"] = Split(train.images[kept], train.targets[kept])
        splits["val"] = Split(train.images[held_out], train.targets[held_out])
    return splits


def read_files() -> dict[str, Split]:
    """The data as it lies on disk."""
    if DATA == "digits":
        arrays = np.load(DATA_PATH)
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
        return {"train": Split(images[..., None], labels.long())}
    if DATA == "cifar10":
        names = [f"data_batch_{number}" for number in range(1, 6)]
        return {"train": read_cifar(names, "labels"), "test": read_cifar(["test_batch"], "labels")}
    if DATA == "cifar100":
        labels = "fine_labels"
        return {"train": read_cifar(["train"], labels), "test": read_cifar(["test"], labels)}
    folders = sorted(folder for folder in Path(DATA_PATH).iterdir() if folder.is_dir())
    names = {"train": "train", "test": "test"}
    names |= dict.fromkeys(("val", "valid", "validation", "dev"), "val")
    return {names[folder.name]: read_class_folders(folder) for folder in folders if folder.name in names}


def read_cifar(names: list[str], label_key: str) -> Split:
    """CIFAR's own files: rows of 3,072 bytes, a channel after the other."""
    parts: list[dict[str, Any]] = []
    for name in names:
        with (Path(DATA_PATH) / name).open("rb") as file:
            parts.append(pickle.load(file, encoding="latin1"))
    rows = np.concatenate([part["data"] for part in parts])
    images = np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return Split(
        torch.from_numpy(images), torch.tensor([label for part in parts for label in part[label_key]])
    )


def read_class_folders(folder: Path) -> Split:
    """Image files of one size, in a folder for each class."""
    images: list[Tensor] = []
    labels: list[int] = []
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
    for label, path in enumerate(classes):
        for file in sorted(str(file) for file in path.iterdir()):
            images.append(torch.from_numpy(np.array(Image.open(file).convert("RGB"))))
            labels.append(label)
    return Split(torch.stack(images), torch.tensor(labels))


def training_batch(train: Split, indices: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
    """The samples `indices` as the model takes them in training."""
    images = train.images[indices]
    if AUGMENTED:
        images = crop_and_flip(images, indices, epoch)
    return normalized(images), train.targets[indices].to(DEVICE)


def evaluation_batch(split: Split, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Some samples of a split as they are."""
    return normalized(split.images[start:stop]), split.targets[start:stop].to(DEVICE)


def normalized(images: Tensor) -> Tensor:
    """Float images (batch, channels, height, width) of mean 0 and deviation 1."""
    pixels = images.to(DEVICE).permute(0, 3, 1, 2)
    if not CHANNELS_LAST:
        pixels = pixels.clone(memory_format=torch.contiguous_format)
    mean = torch.tensor(MEAN, device=DEVICE).view(1, -1, 1, 1)
    scale = (1 / torch.tensor(STD, dtype=torch.float64)).float().to(DEVICE).view(1, -1, 1, 1)
    return pixels.to(torch.float32).sub_(mean).mul_(scale)


def crop_and_flip(images: Tensor, indices: np.ndarray, epoch: int) -> Tensor:
    """Images mirrored at random, padded with black and cropped to their size at a random place."""
    height, width = images.shape[1:3]
    rows = np.broadcast_to(np.arange(height), (len(images), height))
    columns = np.broadcast_to(np.arange(width), (len(images), width))
    if CROP_PADDING:
        pad = CROP_PADDING
        rows = rows + integers(SEED, epoch, indices, CROP_Y, 2 * pad + 1)[:, None]
        columns = columns + integers(SEED, epoch, indices, CROP_X, 2 * pad + 1)[:, None]
        images = torch.nn.functional.pad(images, (0, 0, pad, pad, pad, pad))
    if MIRRORED == "alternating":
        # Each image and its mirror image in turns.
        mirrored = integers(SEED, 0, indices, FLIP, 2) ^ (epoch & 1)
        columns = np.where(mirrored[:, None], images.shape[2] - 1 - columns, columns)
    if MIRRORED is True:
        mirrored = integers(SEED, epoch, indices, FLIP, 2)
        columns = np.where(mirrored[:, None], images.shape[2] - 1 - columns, columns)
    samples = np.arange(len(images))[:, None, None]
    return images[samples, rows[:, :, None], columns[:, None, :]]
