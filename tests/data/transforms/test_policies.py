"""Policies of augmentation: draws and pixels beside torchvision's, masks, and the same bits everywhere."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from running import build_run, train
from test_augment import INDICES, images, on_host, share
from test_masks import BUILD, LOADERS, batches, info
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as V

from ptfast.core.errors import ConfigError
from ptfast.data.sampling import counter_draws
from ptfast.data.sampling.sampler import MicroBatchIndices
from ptfast.data.transforms import policies
from ptfast.data.transforms.augment_plan import Augment, build_augment
from ptfast.data.transforms.row_windows import augmented

DRAWS, SHAPE = 10_000, (20, 36)
PEERS: dict[str, Any] = {
    "trivial": v2.TrivialAugmentWide,
    "rand": v2.RandAugment,
    "auto": v2.AutoAugment,
}
TABLES = {name: v2.AutoAugmentPolicy(name) for name in ("imagenet", "cifar10", "svhn")}


def drawn(augment: Augment, count: int = DRAWS, epoch: int = 0) -> NDArray[np.float64]:
    """(images, operations, 2)."""
    draw = partial(counter_draws.uniform, 3, epoch, np.arange(count))
    return policies.draw_policy(augment, draw, SHAPE)


def of_torchvision(peer: Any, count: int) -> list[tuple[str, float]]:
    """The operations and magnitudes that a transform of torchvision applies to so many images."""
    found: list[tuple[str, float]] = []

    def note(image: Tensor, name: str, magnitude: float, **_: Any) -> Tensor:
        found.append((name, float(magnitude)))
        return image

    peer._apply_image_or_video_transform = note
    torch.manual_seed(0)
    image = torch.zeros(3, *SHAPE, dtype=torch.uint8)
    for _ in range(count):
        peer(image)
    return found


def cells(pairs: Any) -> Counter[tuple[str, float]]:
    return Counter((name, round(magnitude, 2) + 0.0) for name, magnitude in pairs)


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "trivial": ({"policy": "trivial"}, v2.TrivialAugmentWide()),
    "rand": ({"policy": "rand"}, v2.RandAugment()),
    "rand of 3": ({"policy": "rand", "rand_ops": 3, "rand_magnitude": 15}, v2.RandAugment(3, 15)),
    **{f"auto {n}": ({"policy": "auto", "auto_table": n}, v2.AutoAugment(p)) for n, p in TABLES.items()},
}


@pytest.mark.parametrize("case", CASES)
def test_operations_and_magnitudes_are_distributed_as_in_torchvision(case: str) -> None:
    wanted, peer = CASES[case]
    # Several operations an image.
    count = DRAWS // {"rand": 2}.get(wanted["policy"], 1)
    ours = drawn(Augment(**wanted), count)
    assert np.array_equal(ours[:7], drawn(Augment(**wanted), 7))
    numbers, magnitudes = ours[..., 0].astype(int).flatten(), ours[..., 1].flatten()
    scale = np.where(numbers == policies.OPERATIONS.index("Solarize"), 1 / 255, 1.0)
    names = (policies.OPERATIONS[number] for number in numbers)
    own, theirs = cells(zip(names, magnitudes * scale, strict=True)), cells(of_torchvision(peer, count))
    if wanted["policy"] == "auto":
        own = Counter({cell: number for cell, number in own.items() if cell[0] != "Identity"})
    # The same cells, as often as two samples of one distribution have them.
    common = {cell for cell in {**own, **theirs} if own[cell] + theirs[cell] > 20}
    assert all(own[cell] and theirs[cell] for cell in common)
    assert {name for name, _ in own} == {name for name, _ in theirs}
    statistic = sum((own[cell] - theirs[cell]) ** 2 / (own[cell] + theirs[cell]) for cell in common)
    assert statistic < len(common) + 5 * (2 * len(common)) ** 0.5
    assert abs(own.total() - theirs.total()) < 5 * own.total() ** 0.5


@pytest.mark.parametrize("policy", PEERS)
def test_every_magnitude_is_that_of_torchvision(policy: str) -> None:
    table = policies.strengths(policy, SHAPE)
    for name, (magnitudes, signed) in PEERS[policy]._AUGMENTATION_SPACE.items():
        number, theirs = policies.OPERATIONS.index(name), magnitudes(table.shape[1], *SHAPE)
        assert signed == (1 <= number <= 9)
        expected = np.zeros(table.shape[1]) if theirs is None else np.asarray(theirs, np.float64)
        np.testing.assert_allclose(table[number], expected * (255 if name == "Solarize" else 1), atol=2e-5)


def photo(size: int = 4) -> Tensor:
    """Smooth images of all brightnesses, (batch, height, width, channels)."""
    small = torch.randint(0, 256, (size, 3, 4, 6), generator=torch.Generator().manual_seed(0)).float()
    return (
        torch.nn.functional.interpolate(small, SHAPE, mode="bicubic")
        .clamp(20, 230)
        .byte()
        .permute(0, 2, 3, 1)
    )


@pytest.mark.parametrize("name", policies.OPERATIONS)
def test_pixels_are_those_of_torchvision(name: str) -> None:
    source, number = photo(), policies.OPERATIONS.index(name)
    peer = v2.TrivialAugmentWide()
    signed, levels = (-1, 1) if 1 <= number <= 9 else (1,), (2, 9, 22, 30)
    for magnitude in (
        policies.strengths("trivial", SHAPE)[number, n] * sign for n in levels for sign in signed
    ):
        draws = torch.tensor([number, magnitude], dtype=torch.float64).expand(len(source), 1, 2)
        ours = policies.apply_in_turn(source, draws)
        given = magnitude / 255 if name == "Solarize" else magnitude
        theirs = torch.stack([
            peer._apply_image_or_video_transform(
                image, name, given, interpolation=peer.interpolation, fill=peer._fill
            )
            for image in source.permute(0, 3, 1, 2)
        ]).permute(0, 2, 3, 1)  # fmt: skip
        apart = (ours.int() - theirs.int()).abs()
        assert float((apart > 2).float().mean()) < 0.005, (name, magnitude)
    # At the last, and strongest.
    assert name == "Identity" or not torch.equal(ours, source)


# Single changes.


def test_boxes_are_hidden_as_often_and_as_large_as_in_torchvision() -> None:
    augment, whole = Augment(erasing=0.25), MicroBatchIndices(2, np.arange(DRAWS), DRAWS)
    top, bottom, left, right = augment.draw_changes(whole, SHAPE)["erased"].T
    erased = (bottom > top) & (right > left)
    assert erased.mean() == pytest.approx(0.25, abs=0.02)
    peer, image = v2.RandomErasing(1.0), torch.zeros(3, *SHAPE)
    torch.manual_seed(0)
    found = [peer.make_params([image]) for _ in range(2500)]
    names = ("i", "h", "j", "w")
    ours = np.stack([top, bottom - top, left, right - left])[:, erased]
    theirs = np.array([[params[name] for params in found if params["v"] is not None] for name in names])
    points = np.linspace(0.1, 0.9, 9)
    for own, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.quantile(own, points), np.quantile(other, points), atol=1.5)
    assert np.corrcoef(ours)[1, 3] == pytest.approx(np.corrcoef(theirs)[1, 3], abs=0.06)


def test_a_box_is_filled_where_it_lies() -> None:
    source, augment = images(), Augment(erasing=1.0, fill=(1, 2, 3))
    boxes = augment.model_copy(update={"seed": 4}).draw_changes(share(), source.shape[1:3])["erased"]
    assert len({tuple(box) for box in boxes}) == len(INDICES)
    for image, index, (top, bottom, left, right) in zip(
        on_host(augment, source), INDICES, boxes, strict=True
    ):
        expected = source[index].clone()
        expected[top:bottom, left:right] = torch.tensor([1, 2, 3], dtype=torch.uint8)
        assert torch.equal(image, expected)


def test_images_lose_their_colors_as_in_torchvision() -> None:
    source = images(400)
    everything = MicroBatchIndices(0, np.arange(400), 400)
    got = on_host(Augment(grayscale=0.3), source, everything)
    gray = V.rgb_to_grayscale(source.permute(0, 3, 1, 2), 3).permute(0, 2, 3, 1)
    lost = (got.int() - gray.int()).abs().amax((1, 2, 3)) <= 1
    assert 0.2 < float(lost.float().mean()) < 0.4
    assert torch.equal(got[~lost], source[~lost])


def test_hues_turn_as_in_torchvision() -> None:
    source = images()
    got = on_host(Augment(hue=0.4), source)
    turns = 0.8 * counter_draws.uniform(4, 1, INDICES, counter_draws.HUE) - 0.4
    for image, index, turn in zip(got, INDICES, turns, strict=True):
        expected = V.adjust_hue(source[index].permute(2, 0, 1), float(turn)).permute(1, 2, 0)
        assert int((image.int() - expected.int()).abs().max()) <= 2
    assert torch.equal(on_host(Augment(hue=0.4), images(channels=1)), images(channels=1)[INDICES])


def test_blurs_are_gaussians_as_in_torchvision() -> None:
    source = photo(60)
    got = on_host(Augment(blur=0.5), source, MicroBatchIndices(1, np.arange(60), 60))
    draw = partial(counter_draws.uniform, 4, 1, np.arange(60))
    blurred, sigmas = draw(counter_draws.BLUR) < 0.5, 0.1 + 1.9 * draw(counter_draws.BLUR_SIGMA)
    assert 15 < blurred.sum() < 45
    for image, before, chosen, sigma in zip(got, source, blurred, sigmas, strict=True):
        if not chosen:
            assert torch.equal(image, before)
            continue
        expected = V.gaussian_blur(before.permute(2, 0, 1), [19, 19], [sigma, sigma]).permute(1, 2, 0)
        # Beyond its edges an image is mirrored there, and left out here.
        inside = (slice(7, -7), slice(7, -7))
        assert int((image[inside].int() - expected[inside].int()).abs().max()) <= 1


def test_one_strength_stands_for_those_that_are_not_given() -> None:
    both = Augment(color_jitter=0.4, saturation=0.0), Augment(brightness=0.4, contrast=0.4)
    assert torch.equal(*(on_host(augment, images()) for augment in both))


# Masks.


@pytest.mark.parametrize("policy", ["trivial", "rand", "auto"])
def test_masks_move_with_their_images_and_keep_their_labels_otherwise(policy: str) -> None:
    size, kept, moved = 300, 0, 0
    pixels = torch.arange(1, SHAPE[0] * SHAPE[1] + 1).view(SHAPE) % 250 + 1
    source, masks = pixels.byte()[..., None].repeat(size, 1, 1, 3), pixels.byte().repeat(size, 1, 1)
    augment = Augment(policy=policy, auto_table="cifar10", mask_fill=255, seed=3)
    got, changed = augmented(augment, (source, masks), MicroBatchIndices(0, np.arange(size), size))
    for image, mask, numbers in zip(got, changed, drawn(augment, size)[..., 0], strict=True):
        geometric = (numbers >= 1) & (numbers <= 5)
        if not geometric.any():
            assert torch.equal(mask, masks[0])
            kept += 1
        elif (numbers <= 5).all():
            assert torch.equal(torch.where(mask == 255, 0, mask), image[..., 0])
            moved += int(not torch.equal(mask, masks[0]))
    assert min(kept, moved) > 15


def test_every_loader_moves_masks_alike() -> None:
    wanted = {"policy": "rand", "rand_ops": 4, "rand_magnitude": 20}
    whole = {kind: batches(build(), kind, wanted) for kind, build in LOADERS.items() if kind != "stream"}
    for kind, found in whole.items():
        for (pixels, masks), (others, theirs) in zip(whole["plain"], found, strict=True):
            assert torch.equal(masks, theirs.to(masks.dtype)), kind
            assert torch.equal(pixels, others), kind
    assert all((masks == -100).any() and (masks != -100).any() for _, masks in whole["plain"])


def test_an_erased_box_hides_the_labels() -> None:
    augment = Augment(erasing=1.0, mask_fill=255, color_jitter=0.4, grayscale=0.5, blur=0.5, hue=0.1)
    raw = torch.zeros(7, 20, 36, 3, dtype=torch.uint8), torch.ones(7, 20, 36, dtype=torch.uint8)
    hidden = augmented(augment, raw, share())[1] == 255
    boxes = augment.draw_changes(share(), SHAPE)["erased"]
    assert hidden.sum((1, 2)).tolist() == [
        (bottom - top) * (right - left) for top, bottom, left, right in boxes.tolist()
    ]


def test_what_would_be_wrong_in_silence_is_refused(in_tmp: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for wanted, kind in (({"policy": "rand"}, "unknown"), ({"erasing": 0.5}, "map")):
        with pytest.raises(ConfigError):
            build_augment(wanted, info(kind), **BUILD)
    assert build_augment({"hue": 0.1, "blur": 0.1, "grayscale": 0.1}, info("map"), **BUILD)
    for words, reason in (
        (("augment.cutout=2", "augment.erasing=0.5"), "augment.erasing=0.5"),
        (("augment.policy=rand", "augment.rand_magnitude=31"), "augment.rand_magnitude=31"),
        (("augment.erasing=1.5",), "augment.erasing=1.5"),
        (("augment=colour",), "color_jitter"),
    ):
        assert train("steps=2", *words) == 2
        assert reason in capsys.readouterr().err


# All of them, from every loader.

EVERY: dict[str, dict[str, Any]] = {
    **{policy: {"policy": policy, "crop_padding": 1, "flip": True} for policy in PEERS},
    "others": {
        "color_jitter": 0.3,
        "hue": 0.1,
        "grayscale": 0.3,
        "blur": 0.5,
        "erasing": 0.5,
        "policy": "rand",
    },
}


@pytest.mark.parametrize("case", EVERY)
def test_every_loader_and_number_of_workers_gives_the_same_bits(case: str, tmp_path: Any) -> None:
    words = ["model.hidden=[16]", "batch_size=96", *(f"augment.{k}={v}" for k, v in EVERY[case].items())]
    whole = []
    for kind, workers in (("plain", 0), ("memory", 0), ("device", 0), ("workers", 1), ("workers", 2)):
        given = [f"dataloader.kind={kind}", *([f"dataloader.workers={workers}"] if workers else [])]
        loader = build_run(tmp_path / f"{kind}{workers}", *words, *given).train_loader
        assert (loader.kind, loader.workers) == (kind, workers)
        whole.append([step.micro_batches[0].data[0] for step in loader.steps(14, 17)])
        loader.close()
    assert len({float(batch.sum()) for batch in whole[0]}) == 3
    for other in whole[1:]:
        assert all(torch.equal(a, b) for a, b in zip(whole[0], other, strict=True))


@pytest.mark.parametrize("case", EVERY)
def test_an_image_is_the_same_in_any_batch_and_another_in_every_epoch(case: str) -> None:
    source, augment = images(), Augment(**EVERY[case])
    all_at_once = on_host(augment, source)
    alone = [
        on_host(augment, source, MicroBatchIndices(1, INDICES[i : i + 1], 1)) for i in range(len(INDICES))
    ]
    assert torch.equal(torch.cat(alone), all_at_once)
    assert not torch.equal(on_host(augment, source, share(2)), all_at_once)
    assert torch.equal(source, images())
