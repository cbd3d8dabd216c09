"""Small datasets, as files and as classes, for options that read what a user brings."""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

Words = tuple[str, ...]
TEXT = ("data=text_tsv", "data.root=FILES", "batch_size=8")
RUNNING_TEXT = ("data=text_file", "data.path=FILES/text.txt", "data.context_length=16", "batch_size=8")
SMALL = ("model=mlp", "model.hidden=[16]")
WORDS = ("model=text_encoder", "model.width=16")
AIRBENCH = ("model.widths=[4,8]", "model.whitening=3")
TINY_GPT = ("model=gpt", "model.width=16", "model.depth=1")
SEGMENTER = ("model=custom", "model._target_=stand_ins.Segmenter", "batch_size=8")
FEW = ("data.val=20samples", "batch_size=10")
"""Of the digits: a residual network then has no last batch of one sample, and little to evaluate."""
WITH: dict[str, Words] = {
    "data/cifar10": ("data.root=FILES/cifar10",),
    "augment/airbench96": ("augment.cutout=4",),
    "data/cifar100": ("data.root=FILES/cifar100",),
    "data/imagefolder": ("data.root=FILES/images",),
    "data/mask_folder": ("data.root=FILES/masked", *SEGMENTER),
    "data/arrays": ("data.path=FILES/points.npz",),
    "data/text_tsv": (*TEXT, *WORDS),
    "data/text_file": (*RUNNING_TEXT, *TINY_GPT),
    "data/hf": ("data.path=there", "batch_size=8", *WORDS),
    "data/webdataset": ("data.shards=FILES/shards",),
    "data/custom": ("data._target_=stand_ins.Points",),
    "model/text_encoder": (*TEXT, *WORDS),
    "model/gpt": (*RUNNING_TEXT, *TINY_GPT),
    "model/gpt2_124m": (*RUNNING_TEXT, "model.width=24", "model.depth=1"),
    "model/hf": (
        *(*TEXT, "model.name=distilbert", "model.dim=16", "model.hidden_dim=16"),
        *("model.n_layers=1", "model.n_heads=2"),
    ),
    "model/timm": (*FEW, "model.name=resnet10t"),
    "model/torchvision": FEW,
    "model/custom": ("model._target_=stand_ins.Net",),
    "model/airbench94": (*FEW, *AIRBENCH),
    "model/airbench96": (*FEW, *AIRBENCH),
    "model/resnet9": (*FEW, "model.width=8"),
    **{f"model/resnet{name}": FEW for name in ("20", "32", "44", "56", "110", "_digits")},
}
"""Arguments that an option needs beside it; FILES is the folder of stand-ins.

An option with required keys that is not listed is trained by a test of its own."""


class Points(Dataset[Any]):
    """Points in the plane, labelled by the side of a line."""

    def __init__(self, size: int = 64) -> None:
        self.points = torch.randn(size, 2, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.points[index], int(self.points[index].sum() > 0)


class Net(nn.Linear):
    """One layer for digits."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(64, num_classes)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(1))


class Segmenter(nn.Conv2d):
    """One layer that sees three pixels each way."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__(in_channels, num_classes, 3, padding=1)


class Table:
    """Columns of text and labels, as a split of the package `datasets` shows them."""

    column_names = ("text", "label")

    def __init__(self, size: int) -> None:
        self.columns = {"text": ["good film", "bad"] * (size // 2), "label": [1, 0] * (size // 2)}
        self.features = {"text": SimpleNamespace(names=None), "label": SimpleNamespace(names=["no", "yes"])}

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.columns["label"])


def datasets() -> ModuleType:
    """A stand-in for the package `datasets` in which every dataset is there."""
    module = ModuleType("datasets")
    splits = {"train": Table(32), "validation": Table(8)}
    module.load_dataset = lambda path, name=None, streaming=False: splits  # pyright: ignore[reportAttributeAccessIssue]
    return module


def write(folder: Path) -> None:
    """Write into `folder` one small dataset of each kind: `cifar10`, `cifar100`, `images`, `masked`, ..."""
    chance = np.random.default_rng(0)
    for name, classes, files in (
        ("cifar10", 10, [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]),
        ("cifar100", 100, ["train", "test"]),
    ):
        (folder / name).mkdir()
        labels, names = ("labels", "label_names") if classes == 10 else ("fine_labels", "fine_label_names")
        for file in files:
            batch = {"data": chance.integers(0, 256, (20, 3072), dtype=np.uint8), labels: list(range(10)) * 2}
            (folder / name / file).write_bytes(pickle.dumps(batch, protocol=2))
        meta = folder / name / ("batches.meta" if classes == 10 else "meta")
        meta.write_bytes(pickle.dumps({names: [f"class {number}" for number in range(classes)]}, protocol=2))
    from PIL import Image

    for split, size in (("train", 10), ("val", 4)):
        for label in ("dark", "light"):
            (folder / "images" / split / label).mkdir(parents=True)
            for number in range(size):
                pixels = chance.integers(0, 256, (8, 8, 3), np.uint8)
                Image.fromarray(pixels).save(folder / "images" / split / label / f"{number}.png")
    for number in range(12):
        square = chance.integers(0, 256, (8, 8, 3), np.uint8)
        for part, pixels in (("images", square), ("masks", (square[..., 0] > 127).astype(np.uint8))):
            (folder / "masked" / part).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / "masked" / part / f"{number}.png")
    (folder / "shards").mkdir()
    with tarfile.open(folder / "shards" / "0.tar", "w") as tar:
        for number in range(20):
            buffer = io.BytesIO()
            Image.fromarray(chance.integers(0, 256, (8, 8, 3), np.uint8)).save(buffer, "PNG")
            for suffix, content in (("png", buffer.getvalue()), ("cls", str(number % 2).encode())):
                info = tarfile.TarInfo(f"{number:04d}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    points = chance.standard_normal((64, 2)).astype(np.float32)
    np.savez(folder / "points.npz", x=points, y=(points.sum(1) > 0).astype(np.int64))
    for split in ("train", "dev"):
        (folder / f"{split}.tsv").write_text("good film\t1\nbad\t0\n" * 16)
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 60)
