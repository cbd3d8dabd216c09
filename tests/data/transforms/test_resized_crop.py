"""Random resized crops in a run: the same bits from every loader, and those of a crop made by hand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loaders import train_loader
from PIL import Image
from running import same_pixels
from torch import Tensor
from torchvision.transforms.v2 import functional as v2

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError
from ptfast.core.protocols import DataInfo
from ptfast.data.build_data import Data, build_data
from ptfast.data.loaders.loader_choice import choose
from ptfast.data.map_source import TensorSource
from ptfast.data.packs.pack_sources import plan_images
from ptfast.data.packs.pack_writer import make
from ptfast.data.sampling.sampler import MicroBatchIndices
from ptfast.data.sources.digits import Digits
from ptfast.data.sources.image_files import ImageFiles, ImagesInMemory
from ptfast.data.sources.imagefolder import ImageFolder
from ptfast.data.transforms.augment_plan import Augment
from ptfast.data.transforms.resized_crops import box_edges, draw_boxes, pixel_edges
from ptfast.data.transforms.row_windows import cropped

WANTED = {"resized_crop": (0.3, 1.0), "resized_ratio": (0.75, 1.3333), "flip": True}
SIDE = 8


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory: Any) -> Path:
    """JPEG files of two classes, no two of one size."""
    root: Path = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for i in range(12):
        path = root / f"class_{i % 2}" / f"{i}.jpg"
        path.parent.mkdir(exist_ok=True)
        pixels = generator.integers(0, 256, (12 + i, 30 - i, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return root


@pytest.fixture(scope="module")
def files(jpegs: Path) -> Data:
    """The same as files that are decoded as they are needed."""
    paths = [str(path) for path in sorted(jpegs.rglob("*.jpg"))]
    info = DataInfo(kind="image", task="classification", num_classes=2, input_shape=(3, SIDE, SIDE))
    return Data(info, ImageFiles(paths, torch.arange(12) // 6, SIDE), None, None, "")


def loader(data: Data, kind: str, **changes: Any) -> Any:
    fixed = {"batch_size": 5, "seed": 3, "augment": WANTED, "normalize": False, "workers": 2, "kind": kind}
    return train_loader(data, **{**fixed, **changes})


def inputs(loader: Any, steps: int) -> Iterator[Tensor]:
    for batch in loader.steps(0, steps):
        yield from (micro_batch.data[0] for micro_batch in batch.micro_batches)
    loader.close()


def test_boxes_are_cut_out_of_files_before_they_are_resized(tmp_path: Path):
    pixels = np.random.default_rng(1).integers(0, 256, (2, 40, 50, 3), dtype=np.uint8)
    source = TensorSource(torch.from_numpy(pixels), torch.tensor([0, 1]), images=True)
    share = MicroBatchIndices(4, np.array([1, 0]), 2)
    augment = Augment(resized_crop=(0.3, 1.0), flip=True, size=16, seed=9)
    boxes = draw_boxes(9, 4, share.indices, np.full(2, 40), np.full(2, 50), (0.3, 1.0), (0.75, 1.3333))
    flipped = augment.draw(share)[2]
    expected = []
    for index, box, flip in zip(share.indices, boxes, flipped, strict=True):
        top, left, height, width = (round(x) for x in box * [40, 50, 40, 50])
        picture = torch.from_numpy(pixels[index]).permute(2, 0, 1)
        crop = v2.resized_crop(picture, top, left, height, width, [16, 16], antialias=True)
        expected.append((crop.flip(-1) if flip else crop).permute(1, 2, 0))
    assert same_pixels(cropped(augment, source, share, share.indices)[0], torch.stack(expected))


@pytest.mark.parametrize("changes", [{}, {"brightness": 0.4, "cutout": 3}, {"flip": "alternating"}])
def test_worker_processes_change_nothing(files: Data, changes: dict[str, Any]):
    wanted = {**WANTED, **changes}
    plain, workers = (inputs(loader(files, kind, augment=wanted), 6) for kind in ("plain", "workers"))
    batches = list(zip(plain, workers, strict=True))
    assert all(torch.equal(one, other) for one, other in batches)
    # Two epochs of three steps, no image of which is shown twice alike.
    everything = torch.cat([batch for batch, _ in batches])
    assert everything.shape == (24, 3, SIDE, SIDE)
    assert len({image.numpy().tobytes() for image in everything}) == 24


def test_images_in_memory_give_what_they_give_one_by_one():
    digits = build_data(Digits(), val=Duration(10, "percent"), seed=0, task="auto")
    kinds = [inputs(loader(digits, kind, batch_size=64), 3) for kind in ("plain", "memory", "workers")]
    for plain, memory, workers in zip(*kinds, strict=True):
        assert torch.equal(plain, memory)
        assert torch.equal(plain, workers)
        assert plain.shape[1:] == (1, 8, 8)


def test_images_must_be_square(tmp_path: Path):
    for i in range(4):
        path = tmp_path / f"class_{i % 2}" / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((10, 12, 3), 50 * i, np.uint8)).save(path)
    data = build_data(ImageFolder(str(tmp_path)), val=Duration(0, "percent"), seed=0, task="auto")
    with pytest.raises(ConfigError, match=r"images here are 12x10\. Set data\.image_size=10"):
        loader(data, "plain")


@pytest.mark.parametrize("packed", [False, True])
def test_images_held_in_memory_are_cut_as_large_as_they_were(jpegs: Path, tmp_path: Path, packed: bool):
    if packed:
        make(plan_images(jpegs, size=None, jpeg=False, skip_corrupt=False), tmp_path / "pack", workers=1)

    def batches(kind: str) -> Iterator[Tensor]:
        data = build_data(
            ImageFolder(str(tmp_path / "pack" if packed else jpegs), SIDE),
            val=Duration(4, "samples"),
            seed=0,
            task="auto",
            choose=partial(choose, kind=kind, crops=True),
            crops=True,
        )
        assert isinstance(data.train, ImagesInMemory) == (kind == "memory")
        yield from inputs(loader(data, kind, normalize=True), 4)
        # What is not cut out is fitted, and so are the statistics.
        yield data.train.fetch(np.arange(3))[0]
        assert data.val is not None
        yield data.val.fetch(np.arange(4))[0]

    kinds = [batches("plain"), batches("memory"), batches("workers")]
    for plain, memory, workers in zip(*kinds, strict=True):
        assert torch.equal(plain, memory)
        assert torch.equal(plain, workers)


def photos(count: int, height: int, width: int, channels: int = 3) -> Tensor:
    """Images of neighbors that are alike, and of noise: what is averaged, and what rounding shows in."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, channels, 5, 6, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)
    noise = torch.rand(count, channels, height, width, generator=generator)
    both = torch.where(torch.arange(count)[:, None, None, None] % 2 > 0, smooth, noise)
    return (both * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def test_edges_of_many_boxes_are_those_of_each() -> None:
    sides = np.full(32, 40), np.full(32, 56)
    boxes = draw_boxes(5, 2, np.arange(32), *sides, (0.05, 1.0), (0.75, 1.3333))
    for box, edges in zip(boxes, box_edges(boxes, 40, 56).T, strict=True):
        assert tuple(edges) == pixel_edges(*box[[0, 2]], 40) + pixel_edges(*box[[1, 3]], 56)


def test_boxes_are_not_cut_on_the_device(jpegs: Path):
    wanted: dict[str, Any] = {"val": Duration(0, "percent"), "seed": 0, "task": "auto"}
    with pytest.raises(ConfigError, match=r"dataloader\.kind=device: augment\.resized_crop crops") as caught:
        build_data(
            ImageFolder(str(jpegs), SIDE),
            choose=partial(choose, kind="device", crops=True),
            crops=True,
            **wanted,
        )
    assert caught.value.code == "C011"


def test_what_originals_take_is_told_by_a_few(jpegs: Path):
    train = ImageFolder(str(jpegs), SIDE).load(val=Duration(0, "percent"), seed=0).train
    assert train.original_bytes == sum(3 * (12 + i) * (30 - i) for i in range(12))
    assert train.take(np.array([0])).original_bytes == 3 * 12 * 30
    assert train.decoded_bytes == 12 * 3 * SIDE**2
