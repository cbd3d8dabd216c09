"""A hundred image files: each gives the pixels that numpy or PIL alone computes, or an error naming it."""

from __future__ import annotations

import io
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from image_zoo import ZOO, ZooImage
from PIL import Image

from ptfast.core.errors import DataError
from ptfast.data.decoding.image_decoding import MAX_PIXELS, decode_file, fit, size_of
from ptfast.data.decoding.pictures import rgb_pixels


def test_there_are_a_hundred_of_them():
    assert len({each.name for each in ZOO}) == len(ZOO) >= 100


@pytest.mark.parametrize("image", ZOO, ids=[each.name for each in ZOO])
def test_an_image_gives_its_pixels_or_an_error_that_names_it(image: ZooImage, tmp_path: Path):
    path = tmp_path / image.name
    path.write_bytes(image.content)
    if isinstance(image.expected, str):
        with pytest.raises(DataError) as caught:
            decode_file(str(path))
        assert caught.value.code == "D005"
        assert str(caught.value).startswith(f"{path}: ")
        assert image.expected in str(caught.value)
        assert "\n" not in str(caught.value)
        with suppress(DataError):
            size_of(str(path))
        return
    pixels = decode_file(str(path)).pixels
    assert pixels.dtype == np.uint8
    assert pixels.shape == image.expected.shape
    assert np.abs(pixels.astype(int) - image.expected).max() <= image.within
    assert size_of(str(path)) == pixels.shape[:2]
    # The exported `load.py` reads by this function alone.
    assert np.array_equal(rgb_pixels(Image.open(io.BytesIO(image.content))).numpy(), pixels)


def test_a_narrow_image_takes_little_memory():
    # Whole, the last would become 224 x 4,480,000,000.
    code = """
import resource, torch
from ptfast.data.decoding.pictures import in_square
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
in_square(torch.zeros(40, 50, 3, dtype=torch.uint8), 224)
before = peak()
for shape in ((65_000, 1), (1, 65_000), (1, 20_000_000)):
    in_square(torch.zeros(*shape, 3, dtype=torch.uint8), 224)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 400


@pytest.mark.parametrize("size", [8, 224])
@pytest.mark.parametrize("shape", [(1, 300_000), (300_000, 1), (2, 100_001)])
def test_a_narrow_image_keeps_its_center(shape: tuple[int, int], size: int):
    length, short = max(shape), min(shape)
    line = (np.arange(length) // 7 % 256).astype(np.uint8)
    image = np.empty((*shape, 3), np.uint8)
    image[:] = line[:, None, None] if shape[0] == length else line[None, :, None]
    square = fit(image, size)
    row = square[:, 0, 0] if shape[0] == length else square[0, :, 0]
    places = (np.arange(size) + 0.5 - size / 2) * short / size + length / 2 - 0.5
    if short < size:
        expected = np.interp(places, np.arange(length), line)
        # A line of odd length has its center between two cuts.
        assert np.abs(row - expected).max() <= 1
    assert (square == square[:1] if shape[1] == length else square == square[:, :1]).all()


def test_an_image_that_is_not_narrow_is_resized_as_a_whole():
    image = np.random.default_rng(0).integers(0, 256, (20, 1500, 3)).astype(np.uint8)
    whole = torch.nn.functional.interpolate(
        torch.from_numpy(image)[None].permute(0, 3, 1, 2), (24, 1800), mode="bilinear", antialias=True
    )[0].permute(1, 2, 0)
    assert np.array_equal(fit(image, 24), whole[:, 888:912].numpy())


def test_threads_that_open_images_leave_no_limit_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50_000_000)
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "a.png")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: size_of(str(tmp_path / "a.png")), range(400)))
    assert Image.MAX_IMAGE_PIXELS == MAX_PIXELS
