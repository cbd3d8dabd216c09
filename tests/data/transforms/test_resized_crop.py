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
from ptfast.data.loaders.device_loader import ResidentImages
from ptfast.data.loaders.loader_choice import choose
from ptfast.data.map_source import TensorSource
from ptfast.data.packs.pack_image_tree import plan_images
from ptfast.data.packs.pack_writer import make
from ptfast.data.sampling.sampler import MicroBatchIndices
from ptfast.data.sources.digits import Digits
from ptfast.data.sources.image_files import HeldImages, ImageFiles
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
        assert isinstance(data.train, HeldImages) == (kind == "memory")
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


@pytest.mark.parametrize(
    ("height", "width", "size", "channels", "scale"),
    [
        (32, 32, 32, 3, (0.08, 1.0)),
        (40, 56, 24, 3, (0.3, 1.0)),
        (9, 7, 20, 1, (0.05, 0.3)),
        (64, 48, 7, 3, (0.9, 1.0)),
    ],
)
def test_a_device_cuts_the_boxes_of_the_host(
    height: int, width: int, size: int, channels: int, scale: tuple[float, float]
):
    images = photos(32, height, width, channels)
    source = TensorSource(images, torch.zeros(32), images=True)
    share = MicroBatchIndices(2, np.random.default_rng(0).permutation(32), 32)
    augment = Augment(resized_crop=scale, flip=True, size=size, seed=5)
    expected = cropped(augment, source, share, share.indices)[0]
    sides = np.full(32, height), np.full(32, width)
    boxes = draw_boxes(5, 2, share.indices, *sides, scale, augment.resized_ratio)
    edges = [torch.from_numpy(each) for each in box_edges(boxes, height, width)]
    flipped = torch.from_numpy(augment.draw(share)[2])
    cut = ResidentImages(images, 0).cut(torch.from_numpy(share.indices), *edges, flipped, size)
    assert (cut.dtype, cut.shape) == (torch.uint8, (32, size, size, channels))
    errors = (cut.int() - expected.int()).abs()
    assert errors.max() <= 1
    assert (errors > 0).float().mean() < 1e-3
    for index, edge in enumerate(np.stack([each.numpy() for each in edges], 1)):
        by_hand = pixel_edges(*boxes[index, [0, 2]], height) + pixel_edges(*boxes[index, [1, 3]], width)
        assert tuple(edge) == by_hand


@pytest.mark.parametrize("changes", [{}, {"cutout": 3, "brightness": 0.2}])
def test_images_on_the_device_give_the_batches_of_the_others(changes: dict[str, Any]):
    info = DataInfo(kind="image", task="classification", num_classes=2, input_shape=(3, SIDE, SIDE))
    source = TensorSource(photos(24, SIDE, SIDE), torch.arange(24) % 2, images=True)
    data = Data(info, source, None, None, "")
    words: dict[str, Any] = {"augment": {**WANTED, **changes}, "channels_last": True}
    pairs = list(zip(*(inputs(loader(data, kind, **words), 7) for kind in ("plain", "device")), strict=True))
    for plain, device in pairs:
        assert plain.stride() == device.stride()
        # A step of 255 in the pixels, and what a change of brightness makes of it.
        torch.testing.assert_close(device, plain, rtol=0, atol=2.5 / 255)
    assert len(pairs) == 7


@pytest.mark.parametrize("size", [14, None])
def test_a_pack_on_the_device_is_cut_by_the_boxes_of_its_originals(tmp_path: Path, size: int | None):
    for i in range(8):
        path = tmp_path / "files" / f"class_{i % 2}" / f"{i}.png"
        path.parent.mkdir(exist_ok=True, parents=True)
        Image.fromarray(photos(8, 20, 20)[i].numpy()).save(path)
    plan = plan_images(tmp_path / "files", size=size, jpeg=False, skip_corrupt=False)
    make(plan, tmp_path / "p", workers=1)

    def batches(kind: str) -> Iterator[Tensor]:
        wanted = {"val": Duration(0, "percent"), "seed": 0, "task": "auto"}
        chosen = partial(choose, kind=kind, crops=True)
        data = build_data(ImageFolder(str(tmp_path / "p"), SIDE), choose=chosen, crops=True, **wanted)
        return inputs(loader(data, kind), 4)

    for plain, device in zip(batches("packed"), batches("device"), strict=True):
        torch.testing.assert_close(device, plain, rtol=0, atol=1.01 / 255)


def test_images_of_several_sizes_lie_on_no_device(jpegs: Path):
    data = build_data(
        ImageFolder(str(jpegs), SIDE),
        val=Duration(0, "percent"),
        seed=0,
        task="auto",
        choose=partial(choose, kind="device", crops=True),
        crops=True,
    )
    with pytest.raises(
        ConfigError, match=r"dataloader\.kind=device: images lie .* these have 12\."
    ) as caught:
        loader(data, "device")
    assert caught.value.code == "C011"


def test_what_originals_take_is_told_by_a_few(jpegs: Path):
    train = ImageFolder(str(jpegs), SIDE).load(val=Duration(0, "percent"), seed=0).train
    assert train.original_bytes == sum(3 * (12 + i) * (30 - i) for i in range(12))
    assert train.take(np.array([0])).original_bytes == 3 * 12 * 30
    assert train.held_bytes == 12 * 3 * SIDE**2
