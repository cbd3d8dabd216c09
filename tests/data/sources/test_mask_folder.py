"""Images and masks in two folders: read at one size, and refused where they do not belong together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from ptfast.core.durations import Duration
from ptfast.core.errors import DataError
from ptfast.data.build_data import build_data
from ptfast.data.sources.mask_folder import MaskFolder, read_mask


def write(folder: Path, sizes: dict[str, tuple[int, int]], palette: bool = False) -> None:
    """Images whose left half is dark and of class 0, the rest light and of class 2."""
    for name, (height, width) in sizes.items():
        mask = np.where(np.arange(width) < width // 2, 0, 2).astype(np.uint8)[None].repeat(height, 0)
        image = Image.fromarray(mask * 100)
        labels = Image.fromarray(mask)
        if palette:
            labels.putpalette([0, 0, 0, 9, 9, 9, 250, 0, 0])
        for part, picture in (("images", image.convert("RGB")), ("masks", labels)):
            (folder / part).mkdir(parents=True, exist_ok=True)
            picture.save(folder / part / f"{name}.png")


@pytest.mark.parametrize("palette", [False, True])
def test_images_and_masks_come_to_one_size_together(tmp_path: Path, palette: bool) -> None:
    write(tmp_path / "train", {"a": (20, 30), "b": (16, 16), "c": (40, 16)}, palette)
    write(tmp_path / "val", {"d": (12, 12)})
    data = build_data(MaskFolder(str(tmp_path), 8), val=Duration(10, "percent"), seed=0, task="auto")
    assert (data.info.task, data.info.num_classes, data.info.input_shape) == (
        "semantic_segmentation",
        3,
        (3, 8, 8),
    )
    assert data.val is not None
    for source in (data.train, data.val):
        images, masks = source.fetch(np.arange(len(source)))
        assert images.shape == (len(source), 8, 8, 3)
        assert masks[:, :, [0, 1, 6, 7]].tolist() == [[[0, 0, 2, 2]] * 8] * len(source)
        assert (images[:, :, :2] < 50).all()
        assert (images[:, :, 6:] > 150).all()


@pytest.mark.parametrize("kind", [np.uint16, np.int32])
def test_masks_of_wider_whole_numbers_are_class_numbers(tmp_path: Path, kind: type) -> None:
    numbers = np.array([[0, 1], [255, 2]], kind)
    Image.fromarray(numbers).save(tmp_path / "mask.tif")
    assert read_mask(str(tmp_path / "mask.tif")).tolist() == numbers.tolist()
    Image.fromarray(numbers + kind(300)).save(tmp_path / "mask.tif")
    with pytest.raises(DataError, match="not class numbers"):
        read_mask(str(tmp_path / "mask.tif"))


def test_without_splits_some_are_held_out(tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys("abcd", (8, 8)))
    data = build_data(MaskFolder(str(tmp_path)), val=Duration(1, "samples"), seed=0, task="auto")
    assert (len(data.train), len(data.val or ())) == (3, 1)


def remove_a_mask(folder: Path) -> None:
    (folder / "masks" / "b.png").unlink()


def shrink_a_mask(folder: Path) -> None:
    Image.new("L", (4, 8)).save(folder / "masks" / "b.png")


def paint_a_mask(folder: Path) -> None:
    Image.new("RGB", (8, 8)).save(folder / "masks" / "b.png")


def damage_a_mask(folder: Path) -> None:
    (folder / "masks" / "b.png").write_text("no image")


def comment_a_mask(folder: Path) -> None:
    comment = PngImagePlugin.PngInfo()
    comment.add_text("c", "x" * 2_000_000, zip=True)
    Image.new("L", (8, 8)).save(folder / "masks" / "b.png", pnginfo=comment)


def enlarge_a_pair(folder: Path) -> None:
    write(folder, {"b": (16, 16)})


def rename_the_masks(folder: Path) -> None:
    (folder / "masks").rename(folder / "labels")


def remove_the_images(folder: Path) -> None:
    for file in (folder / "images").iterdir():
        file.unlink()


@pytest.mark.parametrize(
    ("harm", "code", "said"),
    [
        (remove_a_mask, "D003", "1 of 3 images have no mask, the first is b"),
        (shrink_a_mask, "D005", "b.png: is 4x8, and its image is 8x8"),
        (paint_a_mask, "D005", "b.png: has pixels of mode RGB, not class numbers"),
        (damage_a_mask, "D005", "b.png: is not an image that can be decoded"),
        (comment_a_mask, "D005", "b.png: is damaged or truncated: Decompressed data too large"),
        (enlarge_a_pair, "D005", "data.image_size=8"),
        (rename_the_masks, "D001", "has no folder masks/"),
        (remove_the_images, "D002", "contains no images"),
    ],
)
def test_what_does_not_belong_together(
    tmp_path: Path, harm: Callable[[Path], None], code: str, said: str
) -> None:
    write(tmp_path, dict.fromkeys("abc", (8, 8)))
    harm(tmp_path)
    with pytest.raises(DataError) as caught:
        MaskFolder(str(tmp_path)).load(val=Duration(0, "samples"), seed=0).train.fetch(np.arange(3))
    assert caught.value.code == code
    assert said in str(caught.value)
