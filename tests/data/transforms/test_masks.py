"""Masks: moved with their images by everything that moves pixels, whoever loads, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from running import build_run, summary, train
from test_custom_dataset import NO_VAL, loader
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset
from toys import shapes

from ptfast.cli.command_line import run as cli
from ptfast.core.errors import ConfigError, DataError
from ptfast.core.protocols import DataInfo
from ptfast.data.build_data import build_data
from ptfast.data.sampling.sampler import MicroBatchIndices
from ptfast.data.sources.arrays import Arrays
from ptfast.data.transforms.augment_plan import Augment, build_augment
from ptfast.data.transforms.mixup_cutmix import Mix
from ptfast.data.transforms.row_windows import augmented
from ptfast.tasks import build_task
from ptfast.tasks.semantic_segmentation import SemanticSegmentation
from ptfast.training.evaluate import TtaModel, check_tta

SIDE, STEP = 24, 10
"""Of the images, and between the gray values of pixels beside each other."""
SAMPLES = 12


def ramps(dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """Images whose first channels say where a pixel is, and masks in which every pixel is a class of its own.

    Ramps stay ramps when they are scaled, turned and shifted, so that pixels tell where they come from to a
    fraction of a pixel. A third channel says how much of the image is seen.
    """
    place = (STEP * torch.arange(SIDE, dtype=torch.uint8)).expand(SIDE, SIDE)
    image = torch.stack([place.T, place, torch.full_like(place, 255)])
    mask = torch.arange(SIDE * SIDE, dtype=dtype).view(SIDE, SIDE)
    return image.repeat(SAMPLES, 1, 1, 1), mask.repeat(SAMPLES, 1, 1)


def agreement(images: Tensor, masks: Tensor, ignored: int = -100) -> float:
    """Share of the pixels whose label is that of the nearest pixel to where they come from.

    Where nothing of an image is seen, no label must count; where some of a pixel is, its label may.
    """
    seen = images[:, 2] * 255
    pixel = SIDE / images.shape[-1]
    labels, far = masks.reshape(len(masks), *masks.shape[-2:]).long(), torch.zeros_like(seen)
    for channel, place in ((0, labels // SIDE), (1, labels % SIDE)):
        far = torch.maximum(far, (images[:, channel] * 255 / STEP - place).abs())
    right = (far <= 0.5 * max(pixel, 1) + 0.2) & (labels != ignored)
    return float(torch.where(seen > 254, right, (seen > 0) | (labels == ignored)).double().mean())


class Sampled(Dataset[Any]):
    """The ramps one by one."""

    num_classes = SIDE * SIDE

    def __init__(self, dtype: torch.dtype = torch.int64) -> None:
        self.images, self.masks = ramps(dtype)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.masks[index]


class Streamed(IterableDataset[Any]):
    """The ramps in a stream, with masks of one channel, as torchvision has them."""

    num_classes = SIDE * SIDE

    def __iter__(self) -> Iterator[Any]:
        return ((image, mask[None]) for image, mask in zip(*ramps(), strict=True))


SPATIAL: dict[str, dict[str, Any]] = {
    "crop": {"crop_padding": 3},
    "reflected crop": {"crop_padding": 3, "crop_padding_mode": "reflect"},
    "flip": {"flip": True},
    "alternating flip": {"flip": "alternating"},
    "affine": {"rotation_degrees": 30, "translation": 0.2, "scaling": 0.3},
    "resized crop": {"resized_crop": (0.2, 0.9), "flip": True},
    "cutout": {"cutout": 9},
    "erasing": {"erasing": 1.0},
    "all": {"crop_padding": 2, "flip": True, "rotation_degrees": 10, "cutout": 5},
}
LOADERS = {
    "plain": lambda: Sampled(),
    "workers": lambda: Sampled(torch.int16),
    "memory": lambda: TensorDataset(*ramps()),
    "device": lambda: TensorDataset(*ramps()),
    "held": lambda: Sampled(),
    "stream": lambda: Streamed(),
}


def batches(dataset: Any, kind: str, augment: dict[str, Any], epochs: int = 2) -> list[tuple[Tensor, Tensor]]:
    data = build_data(dataset, val=NO_VAL, seed=0, task="auto", normalize=False)
    assert data.info.task == "semantic_segmentation"
    kind = {"held": "memory", "stream": "plain"}.get(kind, kind)
    stream = loader(data, kind, augment=augment, normalize=False, workers=1, batch_size=6)
    found = [data for step in stream.steps(0, 2 * epochs) for data, _ in step.micro_batches]
    stream.close()
    return found


@pytest.mark.parametrize("augment", SPATIAL)
def test_every_pixel_keeps_its_label_in_every_loader(augment: str) -> None:
    whole: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for kind, build in LOADERS.items():
        if kind in ("stream", "device") and augment == "resized crop":
            continue  # rejected
        whole[kind] = batches(build(), kind, SPATIAL[augment])
        share = np.mean([agreement(*batch) for batch in whole[kind]])
        assert share == 1.0, f"{augment} by {kind}: {share:.3f}"
        moved = any(not torch.equal(masks.flatten(), ramps()[1][:3].flatten()) for _, masks in whole[kind])
        assert moved, f"{augment} by {kind} moves nothing"
    for kind in ("workers", "memory", "held"):
        for (images, masks), (others, theirs) in zip(whole["plain"], whole[kind], strict=True):
            assert torch.equal(images, others)
            assert torch.equal(masks, theirs.to(masks.dtype))


@pytest.mark.parametrize(
    ("dtype", "ignored", "expected"),
    [
        (torch.uint8, 255, torch.uint8),
        (torch.uint8, -100, torch.int16),
        (torch.bool, -100, torch.int16),
        (torch.int32, 10**6, torch.int32),
    ],
)
def test_what_comes_from_outside_does_not_count_in_masks_of_any_type(
    dtype: torch.dtype, ignored: int, expected: torch.dtype
) -> None:
    masks, share = torch.ones(5, 6, 8).to(dtype), MicroBatchIndices(0, np.arange(5), 5)
    raw = torch.zeros(5, 6, 8, 3, dtype=torch.uint8), masks
    augment = Augment(crop_padding=4, mask_fill=ignored)
    top, left, _ = augment.draw(share)
    got = augmented(augment, raw, share)[1]
    assert got.dtype == expected
    for mask, y, x in zip(got, top, left, strict=True):
        whole = F.pad(torch.ones(6, 8), (4, 4, 4, 4), value=ignored)
        assert torch.equal(mask.double(), whole[y : y + 6, x : x + 8].double())
    # Nothing comes from outside where images are only mirrored.
    assert augmented(Augment(flip=True, mask_fill=ignored), raw, share)[1].dtype == dtype


def info(kind: Any, task: str = "auto") -> DataInfo:
    return DataInfo("image", task, input_shape=(3, 8, 8), target_kind=kind, ignore_index=7)


BUILD: dict[str, Any] = {"images": True, "task_name": "auto", "normalize": False}


def test_targets_that_cannot_move_are_refused() -> None:
    for wanted in ({"flip": True}, {"crop_padding": 1}, {"rotation_degrees": 3.0}):
        with pytest.raises(ConfigError, match=r"such as boxes.*augment\.targets=keep") as caught:
            build_augment(wanted, info("unknown"), **BUILD)
        assert caught.value.code == "C011"
        assert build_augment({**wanted, "targets": "keep"}, info("unknown"), **BUILD).mask_fill is None
        assert build_augment(wanted, info("mask"), **BUILD).mask_fill == 7
        assert build_augment(wanted, info("whole"), **BUILD).mask_fill is None
    # A figure for a pixel that nobody has seen is not known, and every figure counts.
    for wanted in ({"crop_padding": 1}, {"cutout": 2}):
        with pytest.raises(ConfigError, match="no targets to learn"):
            build_augment(wanted, info("map"), **BUILD)
    assert build_augment({"brightness": 0.1}, info("unknown"), **BUILD)


def images_and(targets: Tensor) -> TensorDataset:
    return TensorDataset(torch.zeros(len(targets), 3, 8, 8, dtype=torch.uint8), targets)


@pytest.mark.parametrize(
    ("targets", "kind", "task", "num_classes"),
    [
        (torch.arange(6)[:, None, None].expand(6, 8, 8), "mask", "semantic_segmentation", 6),
        (torch.ones(6, 1, 8, 8, dtype=torch.bool), "mask", "semantic_segmentation", 2),
        (torch.ones(6, 8, 8, dtype=torch.uint16), "mask", "semantic_segmentation", 2),
        (torch.rand(6, 8, 8), "map", "regression", 1),
        (torch.rand(6, 4), "unknown", "regression", 4),
        (torch.arange(24).view(6, 4), "unknown", "regression", 4),
        (torch.rand(6), "whole", "regression", 1),
        (torch.arange(6), "whole", "classification", 6),
        (torch.eye(6, dtype=torch.int64), "whole", "multilabel", 6),
    ],
)
def test_shapes_and_types_tell_what_targets_are(
    targets: Tensor, kind: str, task: str, num_classes: int
) -> None:
    tensors = images_and(targets)
    for dataset in (tensors, Subset(tensors, range(6))):
        found = build_data(dataset, val=NO_VAL, seed=0, task="auto").info
        assert (found.target_kind, found.task, found.num_classes) == (kind, task, num_classes)


def test_masks_of_arrays_are_told_by_their_shape(tmp_path: Path) -> None:
    images, masks = (part.numpy() for part in shapes(12).tensors)
    for shape in ((12, 24, 24), (12, 24, 24, 1)):
        np.savez(tmp_path / "a.npz", x=images.transpose(0, 2, 3, 1), y=masks.reshape(shape))
        arrays = Arrays(str(tmp_path / "a.npz"))
        found = build_data(arrays, val=NO_VAL, seed=0, task="auto", ignore_index=255).info
        assert (found.task, found.num_classes, found.target_kind) == ("semantic_segmentation", 3, "mask")


@pytest.mark.parametrize(
    ("targets", "task", "line"),
    [
        (
            shapes(6, 8 + 4).tensors[1][:, 4:, 4:],
            "auto",
            "go up to 2, except for 255. Set task.ignore",
        ),
        (torch.full((6, 8, 8), 255), "auto", "go up to 0, except for 255"),
        (
            torch.full((6, 8, 8), -1),
            "auto",
            r"label -1 at train sample 0\. Number .* set task.ignore_index=-1",
        ),
        (torch.full((6, 8, 8), -100), "auto", "every label of the train split is -100"),
        (torch.zeros(6, 4, 4, dtype=torch.int64), "auto", "the task of labels of shape 4x4 cannot be told"),
        (
            torch.zeros(6, 8, 8, dtype=torch.int64),
            "classification",
            "one class for each sample.*one for each pi",
        ),
        (torch.zeros(6, dtype=torch.int64), "semantic_segmentation", "takes a whole number for each pixel"),
        (torch.zeros(6, 8, 8), "multilabel", "takes a row of zeros and ones for each sample"),
    ],
)
def test_masks_that_fit_no_task_are_refused(targets: Tensor, task: str, line: str) -> None:
    with pytest.raises(DataError, match=line) as caught:
        build_data(images_and(targets), val=NO_VAL, seed=0, task=task)
    assert caught.value.code == "D004"


class Named(Dataset[Any]):
    """Masks read one by one, the last of which has a label too many."""

    num_classes = 2

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(3, 8, 8, dtype=torch.uint8), torch.full((8, 8), 2 if index == 5 else 1)


def test_masks_are_checked_as_they_are_read() -> None:
    data = build_data(Named(), val=NO_VAL, seed=0, task="auto", normalize=False)
    data.train.fetch(np.arange(5))
    with pytest.raises(DataError, match="label 2 at sample 5, but there are 2 classes"):
        data.train.fetch(np.array([4, 5]))
    counted = type("Counted", (Named,), {"num_classes": None})()
    assert build_data(counted, val=NO_VAL, seed=0, task="auto").info.num_classes == 3


class Fixed(nn.Module):
    """Gives its inputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


class Mapped(Fixed):
    """Gives its inputs as torchvision's models do their outputs."""

    def forward(self, inputs: Tensor) -> Any:
        return {"out": inputs}


def test_an_auxiliary_head_counts_half_and_in_training_alone() -> None:
    task = build_task("auto", DataInfo("image", "semantic_segmentation", num_classes=3))
    assert isinstance(task, SemanticSegmentation)
    out, aux = torch.randn(2, 2, 3, 5, 6, generator=torch.Generator().manual_seed(0))
    masks, outputs = torch.randint(0, 3, (2, 5, 6)), {"out": out, "aux": aux}
    both = task.loss_sum(out, masks) + 0.5 * task.loss_sum(aux, masks)
    torch.testing.assert_close(task.loss_sum(outputs, masks), both)
    assert torch.equal(task.evaluation_loss_sum(outputs, masks), task.loss_sum(out, masks))


def test_figures_are_those_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs, masks = torch.randn(4, 3, 5, 6, generator=generator), torch.randint(0, 3, (4, 5, 6))
    masks[torch.rand(4, 5, 6, generator=generator) < 0.3] = 255
    facts = DataInfo("image", "semantic_segmentation", num_classes=4)
    task = build_task("auto", facts, ignore_index=255)
    metrics, sums = task.metrics(), []
    outputs = torch.cat([outputs, torch.full((4, 1, 5, 6), -9.0)], 1)
    for part in (slice(0, 1), slice(1, 4)):
        sums.append(task.evaluate(Mapped(), (outputs[part], masks[part].to(torch.uint8)), metrics))
    told, counted = outputs.argmax(1), masks != 255
    overlaps = []
    for label in range(3):  # The fourth class occurs nowhere.
        here, there = (told == label) & counted, (masks == label) & counted
        overlaps.append(float((here & there).sum() / (here | there).sum()))
    expected = {
        "mean_iou": float(np.mean(overlaps)),
        "pixel_accuracy": float((told == masks)[counted].double().mean()),
    }
    assert {name: float(value) for name, value in metrics.compute().items()} == pytest.approx(expected)
    loss = sum(loss for loss, _ in sums) / sum(count for _, count in sums)
    assert float(loss) == pytest.approx(float(F.cross_entropy(outputs, masks, ignore_index=255)))
    data = outputs, masks
    assert task.misfit(outputs, data) is task.misfit({"out": outputs}, data) is None
    for wrong in (outputs[..., :3], outputs[:, :3], {"logits": outputs}, None):
        assert task.misfit(wrong, data) == "floats of shape (4, 4, 5, 6)"
    # What is taken for a class that the data has not is wrong.
    task = build_task("auto", replace(facts, num_classes=3), ignore_index=255)
    metrics = task.metrics()
    task.evaluate(Fixed(), (torch.cat([outputs[:, :3], outputs[:, :1] + 99], 1), masks), metrics)
    assert [float(value) for value in metrics.compute().values()] == [0, 0]


def test_a_patch_is_one_of_the_mask_too() -> None:
    masks = torch.arange(6)[:, None, None].repeat(1, 8, 8)
    images = masks[:, None].float() + 1
    for mixup in (0.0, 1.0):
        mixed, (targets, partners, shares) = Mix(mixup, 1.0, 0, masks=True)((images, masks), 3, 0)
        pasted = shares == 1
        assert pasted.any()
        # A pasted patch shows pixels of the partner, and each has its label.
        assert torch.equal(mixed[pasted, 0] - 1, targets[pasted].float())
        assert (targets[pasted] != masks[pasted]).any()
        # A blended image has both labels everywhere, by their shares.
        share = shares[~pasted, None, None]
        blend = share * targets[~pasted] + (1 - share) * partners[~pasted] + 1
        assert torch.allclose(mixed[~pasted, 0], blend, atol=1e-5)


def test_masks_shrink_with_their_images(tmp_path: Path) -> None:
    words = (
        "data=custom",
        "data._target_=test_masks.Sampled",
        "model=custom",
        "model._target_=toys.PixelNet",
    )
    small = ("curriculum.image_size_from=12", "curriculum.image_size_multiple=4", "data.normalize=false")
    run = build_run(tmp_path, *words, *small, "batch_size=4", "epochs=10", "augment.flip=true", "data.val=0")
    sides = set()
    for ((data, _),) in (step.micro_batches for step in run.train_loader.steps(0, run.total_steps)):
        assert agreement(*data) == 1.0
        assert data[0].shape[-2:] == data[1].shape[-2:]
        sides.add(data[1].shape[-1])
    assert sides == {12, 16, 20, 24}


def test_outputs_of_pixels_are_mirrored_back() -> None:
    images = torch.rand(2, 3, 4, 5)
    assert torch.equal(TtaModel(Fixed(), flip=True)(images), images)
    assert torch.equal(TtaModel(Mapped(), flip=True)(images)["out"], images)
    check_tta(True, 0, info("mask"), None)
    check_tta(True, 0, info("unknown"), None, targets="keep")
    with pytest.raises(ConfigError, match="pixels shifted out of the image"):
        check_tta(True, 1, info("mask"), None)
    with pytest.raises(ConfigError, match="such as boxes or points, differ between views"):
        check_tta(True, 0, info("unknown"), None)


def test_a_network_learns_shapes(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("data=custom", "data._target_=toys.shapes", "model=custom", "model._target_=toys.PixelNet")
    words += ("augment=affine", "optimizer.lr=0.02", "batch_size=16", "epochs=4", "run.dir=r")
    assert train(*words, "task.ignore_index=255", "augment.cutmix=0.5", "eval.flip=true") == 0
    shown = capsys.readouterr().out
    assert "task semantic_segmentation of 3 classes" in " ".join(shown.split())
    assert "task=semantic_segmentation because of the labels: whole numbers for each pixel" in shown
    told = summary(Path("r"))
    assert told["task"] == "semantic_segmentation"
    assert told["val"]["mean_iou"] > 0.9
    assert told["best_metric"] == "val.mean_iou"
    assert cli(["eval", "r"]) == 0
    assert json.loads(capsys.readouterr().out)["mean_iou"] == told["best"]["mean_iou"]
    images, masks = shapes(4).tensors
    np.save("new.npy", images.permute(0, 2, 3, 1).numpy())
    assert cli(["predict", "r", "new.npy"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    predicted = torch.tensor([record["mask"] for record in records])
    assert float((predicted == masks)[masks != 255].double().mean()) > 0.95
    assert set(records[0]["shares"]) == {"0", "1", "2"}
    assert cli(["predict", "r", "new.npy", "--masks", "found"]) == 0
    files = [json.loads(line)["mask"] for line in capsys.readouterr().out.splitlines()]
    assert len({*files}) == len(predicted)
    for file, mask in zip(files, predicted, strict=True):
        with Image.open(file) as picture:
            assert np.array_equal(np.asarray(picture), mask.numpy())
    shown = json.loads(Path("r/examples.json").read_text())["samples"]
    assert [each["pixels"] for each in shown] == sorted(each["pixels"] for each in shown)
    assert "of the pixels right: image, mask, prediction" in Path("r/report.html").read_text()
