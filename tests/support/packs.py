"""Packs of images, and the folders that they are made of, for the tests of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ptfast.core.durations import Duration
from ptfast.core.errors import DataError
from ptfast.data.build_data import build_data
from ptfast.data.packs import pack_reader
from ptfast.data.packs.pack_sources import plan_images
from ptfast.data.packs.pack_writer import make
from ptfast.data.sources.imagefolder import ImageFolder

NO_VAL = Duration(0, "percent")
HALF = Duration(50, "percent")


def write(path: Path, seed: int, height: int = 12, width: int = 12, mode: str = "RGB") -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert(mode).save(path)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """`train/` and `test/` of two classes, all of one size."""
    root, seed = tmp_path / "images", 0
    for split, count in (("train", 5), ("test", 2)):
        for name in ("cat", "dog"):
            for i in range(count):
                write(root / split / name / f"{i}.{'jpg' if i else 'png'}", seed := seed + 1)
    return root


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Class folders of images of several sizes and modes."""
    root = tmp_path / "mixed"
    for i, (height, width) in enumerate([(20, 30), (31, 17), (12, 12), (9, 40), (25, 25), (40, 22)]):
        write(root / "ab"[i % 2] / f"{i}.jpg", i, height, width)
    write(root / "a" / "grey.png", 7, 14, 15, "L")
    write(root / "b" / "alpha.png", 8, 16, 13, "RGBA")
    write(root / "b" / "ink.jpg", 9, 16, 13, "CMYK")
    return root


def pack(root: Path, folder: Path, workers: int = 1, **options: Any) -> pack_reader.Manifest:
    wanted = {"size": None, "jpeg": False, "skip_corrupt": False, **options}
    return make(plan_images(root, **wanted), folder, workers)


def load(root: Path, val: Duration = NO_VAL, **kwargs: Any) -> Any:
    return build_data(ImageFolder(str(root), **kwargs), val=val, seed=0, task="auto")


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(folder: Path) -> DataError:
    with pytest.raises(DataError) as caught:
        load(folder)
    assert caught.value.code == "D007"
    assert caught.value.suggestion
    return caught.value
