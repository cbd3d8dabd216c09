"""Augmentation of whole batches: against images changed one by one, for the same draws."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from running import build_run, train
from torch import Tensor

from ptfast.core.errors import ConfigError
from ptfast.core.protocols import DataInfo
from ptfast.data.map_source import TensorSource
from ptfast.data.sampling import counter_draws
from ptfast.data.sampling.sampler import MicroBatchIndices
from ptfast.data.transforms import image_operations as P
from ptfast.data.transforms.augment_plan import Augment, build_augment
from ptfast.data.transforms.row_windows import MemoryBatches, augmented

INDICES = np.array([7, 3, 11, 0, 5, 2, 9])
SHAPE = (9, 14)


def images(size: int = 12, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (size, *SHAPE, channels), dtype=torch.uint8, generator=generator)


def share(epoch: int = 1) -> MicroBatchIndices:
    return MicroBatchIndices(epoch, INDICES, len(INDICES))


def on_host(
    augment: Augment, source: Tensor, given: MicroBatchIndices | None = None, seed: int = 4
) -> Tensor:
    """The images of a share, augmented as a fetched batch."""
    given = given or share()
    raw = source[torch.from_numpy(given.indices)], torch.zeros(len(given.indices))
    return augmented(augment.model_copy(update={"seed": seed}), raw, given)[0]


# Flips.


def test_alternating_flips_show_each_image_and_its_mirror_image_in_turns() -> None:
    everything, augment = np.arange(1000), Augment(flip="alternating")
    first, second, third = (
        augment.draw(MicroBatchIndices(epoch, everything, 1000))[2] for epoch in (0, 1, 2)
    )
    assert 400 < first.sum() < 600
    assert np.array_equal(second, 1 - first)
    assert np.array_equal(third, first)
    drawn = [Augment(flip=True).draw(MicroBatchIndices(epoch, everything, 1000))[2] for epoch in (0, 1)]
    assert 400 < (drawn[0] != drawn[1]).sum() < 600


def test_an_alternating_flip_mirrors_the_pixels() -> None:
    source, augment = images(), Augment(flip="alternating")
    even, odd = (on_host(augment, source, share(epoch)) for epoch in (0, 1))
    assert torch.equal(even, odd.flip(2))
    assert not torch.equal(even, source[torch.from_numpy(INDICES)])


# Color.


def recolored_alone(image: Tensor, brightness: float, contrast: float, saturation: float) -> Tensor:
    """One image by the formulas of PIL's ImageEnhance, without rounding in between."""
    rgb = image.double() * brightness
    gray = (rgb * torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)).sum(-1, keepdim=True)
    mean = gray.mean()
    rgb, gray = mean + contrast * (rgb - mean), mean + contrast * (gray - mean)
    return (gray + saturation * (rgb - gray)).clamp(0, 255)


def test_colors_are_those_of_images_changed_one_by_one() -> None:
    source, augment = images(), Augment(brightness=0.6, contrast=0.5, saturation=1.5)
    got = on_host(augment, source)
    factors = [
        low + (2 - 2 * low if low else 1 + most) * counter_draws.uniform(4, 1, INDICES, stream)
        for stream, most, low in (
            (counter_draws.BRIGHTNESS, 0.6, 0.4),
            (counter_draws.CONTRAST, 0.5, 0.5),
            (counter_draws.SATURATION, 1.5, 0.0),
        )
    ]
    assert all(len(set(drawn)) == len(INDICES) for drawn in factors)
    for i, (index, *own) in enumerate(zip(INDICES, *factors, strict=True)):
        expected = recolored_alone(source[index], *own)
        assert float((got[i].double() - expected).abs().max()) < 1.6


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_one_color_is_what_torchvision_makes_of_it(name: str) -> None:
    from torchvision.transforms.v2 import functional as V

    source, augment = images(), Augment(**{name: 0.5})
    drawn = 0.5 + counter_draws.uniform(4, 1, INDICES, getattr(counter_draws, name.upper()))
    expected = torch.stack(
        [
            getattr(V, f"adjust_{name}")(source[index].permute(2, 0, 1), float(factor)).permute(1, 2, 0)
            for index, factor in zip(INDICES, drawn, strict=True)
        ]
    )
    # torchvision cuts off where we round, and takes whole numbers for gray.
    assert int((on_host(augment, source).int() - expected.int()).abs().max()) <= 2


@pytest.mark.parametrize("channels", [1, 2])
def test_colors_of_other_images_than_rgb(channels: int) -> None:
    source = images(channels=channels)
    got = on_host(Augment(brightness=0.5), source)
    factors = 0.5 + counter_draws.uniform(4, 1, INDICES, counter_draws.BRIGHTNESS)
    expected = source[torch.from_numpy(INDICES)] * torch.from_numpy(factors).view(-1, 1, 1, 1)
    assert float((got - expected.clamp(max=255)).abs().max()) <= 0.51
    if channels == 1:
        untouched = on_host(Augment(saturation=0.5), source)
        assert int((untouched.int() - source[torch.from_numpy(INDICES)].int()).abs().max()) <= 1


def test_factors_of_one_change_nothing() -> None:
    one = np.ones(12)
    assert torch.equal(P.recolor(images(), torch.from_numpy(P.color_factors(one, one, one))), images())


# Turns, shifts and sizes.


def bent_alone(image: Tensor, angle: float, scale: float, shift_y: float, shift_x: float) -> Tensor:
    """One image, every pixel looked up by itself with bilinear weights."""
    height, width, _ = image.shape
    out = torch.zeros(image.shape, dtype=torch.float64)
    cy, cx = (height - 1) / 2, (width - 1) / 2
    for y in range(height):
        for x in range(width):
            u, v = x - cx - shift_x, y - cy - shift_y
            sx = (math.cos(angle) * u + math.sin(angle) * v) / scale + cx
            sy = (-math.sin(angle) * u + math.cos(angle) * v) / scale + cy
            for iy in (math.floor(sy), math.floor(sy) + 1):
                for ix in (math.floor(sx), math.floor(sx) + 1):
                    if 0 <= iy < height and 0 <= ix < width:
                        out[y, x] += (1 - abs(sy - iy)) * (1 - abs(sx - ix)) * image[iy, ix].double()
    return out


def test_turns_are_those_of_images_turned_one_by_one() -> None:
    source, augment = images(), Augment(rotation_degrees=30, translation=0.2, scaling=0.3)
    got = on_host(augment, source)
    drawn = {
        stream: 2 * counter_draws.uniform(4, 1, INDICES, getattr(counter_draws, stream)) - 1
        for stream in ("ROTATION", "SCALING", "SHIFT_Y", "SHIFT_X")
    }
    for i, index in enumerate(INDICES):
        expected = bent_alone(
            source[index],
            math.radians(30 * drawn["ROTATION"][i]),
            1 + 0.3 * drawn["SCALING"][i],
            0.2 * 9 * drawn["SHIFT_Y"][i],
            0.2 * 14 * drawn["SHIFT_X"][i],
        )
        assert float((got[i].double() - expected).abs().max()) < 0.51


@pytest.mark.parametrize(
    ("degrees", "scale", "shift_y", "shift_x"), [(25.0, 1.0, 0, 0), (-10.0, 1.2, 2, -3), (0.0, 0.8, 0, 4)]
)
def test_turns_are_those_of_torchvision(degrees: float, scale: float, shift_y: int, shift_x: int) -> None:
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as V

    source = images(3)
    one = np.ones(3)
    coefficients = P.affine_coefficients(
        math.radians(degrees) * one, scale * one, shift_y * one, shift_x * one, SHAPE
    )
    expected = V.affine(
        source.permute(0, 3, 1, 2),
        angle=degrees,
        translate=[shift_x, shift_y],
        scale=scale,
        shear=[0.0, 0.0],
        interpolation=InterpolationMode.BILINEAR,
    ).permute(0, 2, 3, 1)
    got = P.affine(source, torch.from_numpy(coefficients))
    assert int((got.int() - expected.int()).abs().max()) <= 1


# Squares.


@pytest.mark.parametrize("fill", [(), (12, 200, 77)])
@pytest.mark.parametrize("side", [1, 4, 5])
def test_a_square_around_the_drawn_center_is_hidden(side: int, fill: tuple[int, ...]) -> None:
    source, augment = images(), Augment(cutout=side, fill=fill)
    got = on_host(augment, source)
    y, x = (
        counter_draws.integers(4, 1, INDICES, stream, size)
        for stream, size in ((counter_draws.CUTOUT_Y, 9), (counter_draws.CUTOUT_X, 14))
    )
    for image, index, center_y, center_x in zip(got, INDICES, y, x, strict=True):
        expected = source[index].clone()
        top, left = int(center_y) - side // 2, int(center_x) - side // 2
        for row in range(max(top, 0), min(top + side, 9)):
            for column in range(max(left, 0), min(left + side, 14)):
                expected[row, column] = torch.tensor(fill or (0, 0, 0))
        assert torch.equal(image, expected)


def test_what_is_hidden_is_the_mean_where_inputs_are_normalized() -> None:
    info = DataInfo("image", "classification", extra={"normalize": {"mean": [10.4, 99.6], "std": [1.0, 1.0]}})
    build = {"images": True, "task_name": "auto"}
    assert build_augment({"cutout": 3}, info, normalize=True, **build).fill == (10, 100)
    assert build_augment({"cutout": 3}, info, normalize=False, **build).fill == ()


# All of them.

ALL = Augment(
    crop_padding=2,
    flip=True,
    cutout=4,
    brightness=0.4,
    contrast=0.4,
    saturation=0.4,
    rotation_degrees=20,
    translation=0.1,
    scaling=0.1,
    fill=(1, 2, 3),
)


@pytest.mark.parametrize("augment", [ALL, Augment(cutout=3), Augment(rotation_degrees=9, flip=True)])
def test_padded_copies_give_what_a_fetched_batch_gives(augment: Augment) -> None:
    source = images()
    held = TensorSource(source, torch.arange(len(source)), images=True)
    copies = MemoryBatches(held, augment.model_copy(update={"seed": 4}))
    for epoch in (0, 1, 0):
        assert torch.equal(copies(share(epoch))[0], on_host(augment, source, share(epoch)))


def test_an_image_has_the_same_draws_in_any_batch_and_others_in_any_epoch() -> None:
    source = images()
    whole = on_host(ALL, source)
    few = INDICES[2:4]
    part = on_host(ALL, source, MicroBatchIndices(1, few, 2))
    assert torch.equal(whole[2:4], part)
    assert not torch.equal(whole, on_host(ALL, source, share(2)))


def test_threads_change_no_bit() -> None:
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(0, 256, (64, 40, 40, 3), dtype=torch.uint8, generator=generator)
    everything = MicroBatchIndices(0, np.arange(64), 64)
    threads = torch.get_num_threads()
    try:
        results = []
        for number in (1, 2):
            torch.set_num_threads(number)
            results.append(on_host(ALL, source, everything, seed=0))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_the_source_is_left_as_it_is() -> None:
    source = images()
    for augment in (ALL, Augment(cutout=3), Augment(contrast=0.5), Augment(flip=True)):
        augmented(augment, (source[:7], torch.zeros(7)), share())
    assert torch.equal(source, images())


EVERYTHING = (
    "augment.crop_padding=1",
    "augment.flip=alternating",
    "augment.cutout=3",
    "augment.brightness=0.2",
    "augment.contrast=0.3",
    "augment.saturation=0.1",
    "augment.rotation_degrees=10",
    "augment.translation=0.1",
    "augment.scaling=0.2",
)


def test_every_loader_gives_the_same_bits(tmp_path: Any) -> None:
    words = ("model.hidden=[16]", "batch_size=96", *EVERYTHING, "dataloader.workers=2")
    batches = []
    for kind in ("plain", "memory", "workers"):
        loader = build_run(tmp_path / kind, *words, f"dataloader.kind={kind}").train_loader
        assert loader.kind == kind
        # Over the end of an epoch.
        batches.append([step.micro_batches[0].data[0] for step in loader.steps(14, 19)])
        loader.close()
    for other in batches[1:]:
        assert all(torch.equal(a, b) for a, b in zip(batches[0], other, strict=True))


def test_the_panel_shows_it(in_tmp: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("model.hidden=[16]", "steps=2", *EVERYTHING) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "crop after 1 pixels of padding, alternating flip, turn by up to 10 degrees" in shown
    assert "brightness 0.2, contrast 0.3, saturation 0.1, translation 0.1, scaling 0.2, cutout of 3" in shown


def test_a_square_that_hides_everything_is_refused() -> None:
    info = DataInfo("image", "classification", input_shape=(1, 6, 9))
    words: dict[str, Any] = {"images": True, "task_name": "auto", "normalize": True}
    assert build_augment({"cutout": 6}, info, **words).cutout == 6
    with pytest.raises(ConfigError, match=r"augment\.cutout=7: hides whole images of 9x6") as caught:
        build_augment({"cutout": 7}, info, **words)
    assert caught.value.code == "C011"


@pytest.mark.parametrize(
    "word",
    [
        "augment.flip=sometimes",
        "augment.cutout=-1",
        "augment.scaling=1",
        "augment.rotation_degrees=200",
        "augment.brightness=true",
    ],
)
def test_what_makes_no_sense_is_rejected(word: str, in_tmp: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("steps=2", word) == 2
    assert word.split("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("planes", [False, True])
def test_a_box_is_hidden_in_images_of_any_type_and_layout(dtype: torch.dtype, planes: bool) -> None:
    images = torch.arange(1, 3 * 5 * 6 * 2 + 1).remainder(100).to(dtype).view(3, 5, 6, 2)
    images = images.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1) if planes else images
    boxes = torch.tensor([[-2, 2, 4, 9], [1, 5, 0, 3], [0, 0, 0, 0]], dtype=torch.int32)
    expected = images.clone()
    expected[0, :2, 4:], expected[1, 1:, :3] = (torch.tensor([7, 9], dtype=dtype),) * 2
    assert torch.equal(P.erase(images, boxes, (7, 9)), expected)
