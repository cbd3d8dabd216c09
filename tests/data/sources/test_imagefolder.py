"""Image folders: what is read, and the one line for each way in which a tree can be wrong."""

from __future__ import annotations

import os
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

from ptfast.core.durations import Duration
from ptfast.core.errors import DataError
from ptfast.core.protocols import IGNORE_INDEX
from ptfast.data.build_data import build_data
from ptfast.data.decoding.image_decoding import fit, size_of
from ptfast.data.loaders import loader_choice
from ptfast.data.map_source import TensorSource
from ptfast.data.new_inputs import read_inputs
from ptfast.data.sources.image_files import ImageFiles
from ptfast.data.sources.imagefolder import ImageFolder
from ptfast.data.transforms.normalize import statistics
from ptfast.data.transforms.resized_crops import draw_boxes, resized_crop

NO_VAL = Duration(0, "percent")


def pixels(seed: int, height: int = 12, width: int = 12) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def write(path: Path, image: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """`train/` and `test/` of two classes, JPEG and PNG."""
    seed = 0
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            for i in range(3):
                write(tmp_path / split / name / f"{i}.{'jpg' if i else 'png'}", pixels(seed := seed + 1))
    return tmp_path


def load(root: Path, **kwargs: Any) -> Any:
    return build_data(ImageFolder(str(root), **kwargs), val=NO_VAL, seed=0, task="auto")


def test_a_tree_is_read_in_the_order_of_its_names(tree: Path):
    data = load(tree)
    assert data.note == "imagefolder: 6 train, 6 test"
    assert data.info.class_names == ("cat", "dog")
    assert data.info.input_shape == (3, 12, 12)
    images, labels = data.train.fetch(np.arange(6))
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]
    for i, path in enumerate(sorted((tree / "train").rglob("*.*g"))):
        assert np.array_equal(images[i].numpy(), np.asarray(Image.open(path).convert("RGB")))


def test_class_folders_alone_are_a_training_split(tree: Path):
    data = load(tree / "train")
    assert len(data.train) == 6
    assert data.test is None


def held_in_memory(root: Path, **kwargs: Any) -> Any:
    choose = partial(loader_choice.choose, kind="memory")
    return build_data(ImageFolder(str(root), **kwargs), val=NO_VAL, seed=0, task="auto", choose=choose)


def test_images_that_are_held_in_memory_give_the_same_batches(tree: Path):
    held, files = held_in_memory(tree), load(tree)
    assert isinstance(files.train, ImageFiles)
    assert isinstance(held.train, TensorSource)
    assert isinstance(held.test, TensorSource)
    indices = np.array([4, 0, 5])
    for one, other in zip(held.train.fetch(indices), files.train.fetch(indices), strict=True):
        assert torch.equal(one, other)
    assert held.info.extra["normalize"] == files.info.extra["normalize"]


@pytest.mark.parametrize("exact_bytes", [2**30, 100])
def test_statistics_are_the_same_bits_whoever_holds_the_images(
    tree: Path, monkeypatch: pytest.MonkeyPatch, exact_bytes: int
):
    """Of all images where they take little, else of some; never of others because they are in memory."""
    monkeypatch.setattr("ptfast.data.transforms.normalize.EXACT_BYTES", exact_bytes)
    monkeypatch.setattr("ptfast.data.transforms.normalize._SAMPLE_LIMIT", 4)
    files, held = load(tree).info.extra["normalize"], held_in_memory(tree).info.extra["normalize"]
    assert files == held
    values = load(tree).train.fetch(np.arange(6) if exact_bytes == 2**30 else np.array([0, 1, 3, 5]))[0]
    assert np.allclose(files["mean"], values.double().reshape(-1, 3).mean(0), rtol=1e-12)


def test_a_file_that_is_written_over_counts_anew(tree: Path):
    before = load(tree).info.extra["normalize"]
    path = tree / "train" / "cat" / "0.png"
    Image.fromarray(pixels(99)).save(path)
    os.utime(path, ns=(0, 2**62))
    assert load(tree).info.extra["normalize"] != before


def test_statistics_from_disk_are_remembered(
    tree: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any
):
    monkeypatch.setenv("PTFAST_CACHE", str(tmp_path_factory.mktemp("cache")))
    paths = [str(path) for path in sorted((tree / "train").rglob("*.jpg"))]
    source = ImageFiles(paths, torch.zeros(len(paths)))
    first = statistics(source, lambda: "a key")
    source.fetch = None  # pyright: ignore[reportAttributeAccessIssue]
    assert statistics(source, lambda: "a key") == first


def test_mean_and_deviation_are_those_of_the_pixels(tree: Path):
    data = load(tree)
    values = data.train.fetch(np.arange(6))[0].double().reshape(-1, 3)
    known = data.info.extra["normalize"]
    assert np.allclose(known["mean"], values.mean(0), rtol=1e-12)
    assert np.allclose(known["std"], values.std(0, correction=0), rtol=1e-9)


def test_mixed_sizes_need_a_size(tree: Path):
    write(tree / "train" / "cat" / "9.png", pixels(9, 20, 30))
    with pytest.raises(
        DataError, match=r"9\.png: is 30x20 where the first image is 12x12\. .*data\.image_size=12"
    ):
        load(tree)
    assert load(tree, image_size=10).info.input_shape == (3, 10, 10)


def test_fit_scales_the_shorter_side_and_keeps_the_centre():
    image = np.zeros((20, 60, 3), np.uint8)
    image[:, 20:40] = 200
    fitted = fit(image, 10)
    assert fitted.shape == (10, 10, 3)
    assert (fitted[:, 1:-1] == 200).all()


def test_grey_cmyk_and_16_bit_images_are_converted_and_said(tree: Path):
    folder = tree / "train" / "cat"
    Image.fromarray(pixels(1)).convert("CMYK").save(folder / "a.jpg")
    Image.fromarray(pixels(2)).convert("L").save(folder / "b.jpg")
    deep = (np.arange(144, dtype=np.uint16).reshape(12, 12) * 400).astype(np.uint16)
    Image.fromarray(deep).save(folder / "c.png")
    for words in ({}, {"on_corrupt": "skip"}):
        note = held_in_memory(tree, **words).note
        assert "3 images that are not 8-bit RGB were converted" in note
        data = build_data(
            ImageFolder(str(tree), **words),
            val=NO_VAL,
            seed=0,
            task="auto",
            choose=partial(loader_choice.choose, kind="memory", crops=True),
            crops=True,
        )
        assert data.note == note
    data = held_in_memory(tree)
    assert "3 images that are not 8-bit RGB were converted" in data.note
    images, _ = data.train.fetch(np.arange(6))
    assert np.array_equal(images[5, :, :, 0].numpy(), deep >> 8)


def spoil(tree: Path, how: str) -> Path:
    """Make one kind of damage to a tree, and return the path that the error should name."""
    target = tree / "train" / "cat" / "1.jpg"
    content = target.read_bytes()
    if how == "truncated":
        target.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        target.write_bytes(b"")
    elif how == "text":
        target.write_text("this is no image")
    elif how == "comment":
        # PIL raises a ValueError for it.
        comment = PngImagePlugin.PngInfo()
        comment.add_text("c", "x" * 2_000_000, zip=True)
        Image.fromarray(pixels(1)).save(target, "PNG", pnginfo=comment)
    elif how == "bomb":
        at = content.index(b"\xff\xc0")
        target.write_bytes(content[: at + 5] + struct.pack(">HH", 60000, 60000) + content[at + 9 :])
    return target


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("truncated", "is damaged or truncated"),
        ("empty", r"is empty \(0 bytes\)"),
        ("text", "is not an image that can be decoded"),
        ("bomb", "claims 3,600,000,000 pixels"),
    ],
)
def test_a_file_that_cannot_be_decoded_is_named(tree: Path, how: str, line: str):
    path = spoil(tree, how)
    with pytest.raises(DataError, match=line) as error:
        load(tree)
    assert error.value.code == "D005"
    assert str(error.value).startswith(str(path))


def test_a_truncated_png_is_named(tree: Path):
    path = tree / "train" / "cat" / "0.png"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match="is damaged or truncated") as error:
        load(tree)
    assert str(error.value).startswith(str(path))


def test_trees_that_are_none(tree: Path, tmp_path_factory: Any):
    place = tmp_path_factory.mktemp("other")

    def code(root: Path) -> tuple[str, str]:
        with pytest.raises(DataError) as error:
            load(root)
        return error.value.code, str(error.value)

    assert code(tree / "nowhere") == (
        "D001",
        f"data.root={tree / 'nowhere'}: no such folder. Set data.root to a folder of class folders.",
    )
    assert "is a file, not a folder" in code(tree / "train" / "cat" / "0.png")[1]
    assert code(place)[0] == "D002"
    write(place / "one" / "0.png", pixels(0))
    assert code(place) == (
        "D003",
        f"data.root={place}: contains one class only (one), so there is nothing to classify. "
        "Give each class a folder of its own.",
    )
    (place / "two").mkdir()
    assert code(place)[1].startswith(f"{place / 'two'}: class folder without images")
    write(tree / "test" / "cow" / "0.png", pixels(0))
    (tree / "test" / "dog").rename(tree / "test" / "doge")
    assert (
        "its classes differ from those of train/: has cow, doge, which train/ lacks and lacks dog"
        in code(tree)[1]
    )


def test_prediction_reads_images_as_training_did(tree: Path):
    data = load(tree)
    names, inputs = next(iter(read_inputs(data.info, [str(tree / "train")], device=torch.device("cpu"))))
    assert names == [str(path) for path in sorted((tree / "train").rglob("*.*g"))]
    known = data.info.extra["normalize"]
    raw = data.train.fetch(np.arange(6))[0].permute(0, 3, 1, 2)
    expected = (raw - torch.tensor(known["mean"]).view(3, 1, 1)) / torch.tensor(known["std"]).view(3, 1, 1)
    assert torch.allclose(inputs, expected, atol=1e-5)
    with pytest.raises(DataError, match="no such file or folder"):
        next(read_inputs(data.info, ["nowhere.png"], device=torch.device("cpu")))


def test_the_size_of_a_file_is_what_its_header_says(tmp_path: Path):
    paths = [tmp_path / name for name in ("a.jpg", "b.png", "c.bmp")]
    for path in paths:
        write(path, pixels(0, 7, 9))
    Image.fromarray(pixels(0, 7, 9)).save(paths[0], exif=b"Exif\0\0" + bytes(60_000), quality=50)
    assert [size_of(str(path)) for path in paths] == [(7, 9)] * 3
    paths[0].write_text("no image")
    with pytest.raises(DataError, match="is not an image that can be decoded"):
        size_of(str(paths[0]))
    with pytest.raises(DataError, match="cannot be read: No such file"):
        size_of("nowhere.jpg")


def files_of(tree: Path, **kwargs: Any) -> ImageFiles:
    paths = sorted(str(path) for path in (tree / "train").rglob("*.*g"))
    return ImageFiles(paths, torch.arange(len(paths)), 8, **kwargs)


def test_crops_come_from_whole_files_whatever_the_threads(tree: Path):
    write(tree / "train" / "cat" / "0.png", pixels(50, 40, 30))
    files, indices = files_of(tree), np.array([0, 4, 2, 0])
    heights, widths = files.sizes(indices)
    assert heights.tolist() == [40, 12, 12, 40]
    assert widths.tolist() == [30, 12, 12, 30]
    boxes = draw_boxes(0, 0, indices, heights, widths, (0.2, 1.0), (0.7, 1.4))
    mirrored = np.array([1, 0, 1, 0])
    wholes = [np.asarray(Image.open(files.paths[i]).convert("RGB")) for i in indices]
    each = zip(wholes, boxes, mirrored.tolist(), strict=True)
    expected = torch.stack([resized_crop(*whole, 16) for whole in each])
    assert torch.equal(files.crops(indices, boxes, 16, mirrored), expected)
    torch.set_num_threads(2)
    try:
        assert torch.equal(files.crops(indices, boxes, 16, mirrored), expected)
    finally:
        torch.set_num_threads(1)
    subset = files.take(np.array([4, 0]))
    assert torch.equal(subset.crops(np.array([1, 0]), boxes[:2], 16, mirrored[:2]), expected[:2])
    assert subset.labels(np.array([1, 0])).tolist() == [0, 4]


@pytest.mark.parametrize("how", ["truncated", "empty", "text", "comment", "bomb"])
def test_skipping_a_file_moves_no_other_sample(tree: Path, how: str):
    everything = np.arange(6)
    whole = files_of(tree).fetch(everything)[0]
    path = spoil(tree, how)
    files = files_of(tree, on_corrupt="skip")
    place = files.paths.index(str(path))
    images, labels = files.fetch(everything)
    assert labels.tolist() == [IGNORE_INDEX if i == place else i for i in range(6)]
    # The next file stands in, so that BatchNorm sees an image.
    assert torch.equal(images[place], whole[place + 1])
    rest = everything != place
    assert torch.equal(images[rest], whole[rest])
    boxes = draw_boxes(0, 0, everything, *files.sizes(everything), (0.2, 1.0), (0.7, 1.4))
    assert files.crops(everything, boxes, 8, np.zeros(6, int)).shape == (6, 8, 8, 3)


def test_a_tree_of_which_nothing_can_be_read_is_refused(tree: Path):
    for path in (tree / "train").rglob("*.*g"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match="cannot be decoded, and neither can any other file"):
        load(tree, on_corrupt="skip")


def test_the_first_unreadable_file_is_named_whatever_the_threads(tree: Path):
    files = files_of(tree)
    for i in (5, 2, 3):
        Path(files.paths[i]).write_bytes(b"")
    torch.set_num_threads(2)
    try:
        with pytest.raises(DataError, match=r"is empty") as error:
            files.fetch(np.arange(6))
    finally:
        torch.set_num_threads(1)
    assert str(error.value).startswith(files.paths[2])
