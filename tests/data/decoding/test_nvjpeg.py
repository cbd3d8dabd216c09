"""JPEG files decoded by a GPU: the crops of the host, and the host's in place of what it cannot decode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.io  # noqa: F401 - registers its operators
from PIL import Image
from torch import Tensor

from ptfast.core.durations import Duration
from ptfast.core.errors import DataError, MachineError
from ptfast.core.protocols import IGNORE_INDEX
from ptfast.data.decoding import nvjpeg
from ptfast.data.decoding.nvjpeg import NvJpegFiles
from ptfast.data.loaders.loader_choice import choose
from ptfast.data.sources.image_files import ImageFiles
from ptfast.data.sources.imagefolder import ImageFolder
from ptfast.data.transforms.resized_crops import draw_boxes

CPU = torch.device("cpu")
INDICES = np.array([3, 0, 4, 3, 2, 1])
MIRRORED = np.array([0, 1, 0, 1, 0, 0])


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Smooth images of several sizes: JPEG in colour, in grey, and a PNG."""
    found = []
    for i, name in enumerate(("a.jpg", "b.jpg", "grey.jpg", "c.png", "d.jpg")):
        path = tmp_path / f"class_{i % 2}" / name
        path.parent.mkdir(exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 256, (5, 6, 3), dtype=np.uint8)
        image = Image.fromarray(pixels).resize((60 + i, 50 - i))
        # A GPU enlarges subsampled colours in another way.
        (image.convert("L") if "grey" in name else image).save(path, subsampling=0)
        found.append(str(path))
    return found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many files the stand-in of the GPU was asked for, each time."""
    counts: list[int] = []

    def decode(buffers: list[Tensor], device: torch.device) -> list[Tensor]:
        counts.append(len(buffers))
        return [torch.ops.image.decode_jpeg(buffer, 3, False) for buffer in buffers]

    monkeypatch.setattr(nvjpeg, "decode_on_device", decode)
    monkeypatch.setattr(NvJpegFiles, "device", staticmethod(lambda: CPU))
    return counts


def crops(kind: type[ImageFiles], paths: list[str], on_corrupt: str = "error") -> tuple[Tensor, Tensor]:
    files = kind(paths, torch.arange(5), 16, on_corrupt)  # pyright: ignore[reportArgumentType]
    boxes = draw_boxes(0, 0, INDICES, *files.sizes(INDICES), (0.2, 1.0), (0.7, 1.4))
    return files.crops(INDICES, boxes, 24, MIRRORED), files.labels(INDICES)


def near(one: Tensor, other: Tensor, levels: int = 1) -> bool:
    return one.shape == other.shape and int((one.int() - other.int()).abs().max()) <= levels


def test_crops_are_those_of_the_host_up_to_rounding(paths: list[str], asked: list[int]):
    found, labels = crops(NvJpegFiles, paths)
    expected, _ = crops(ImageFiles, paths)
    assert near(found, expected)
    assert found.is_contiguous()
    assert labels.tolist() == INDICES.tolist()
    # Three of five files are JPEG in colour.
    assert asked == [3]


def test_a_batch_that_the_gpu_refuses_is_decoded_on_the_host(
    paths: list[str], asked: list[int], monkeypatch: pytest.MonkeyPatch
):
    def refuse(buffers: list[Tensor], device: torch.device) -> list[Tensor]:
        raise RuntimeError("nvjpegDecodeJpegHost failed: 2")

    monkeypatch.setattr(nvjpeg, "decode_on_device", refuse)
    assert torch.equal(crops(NvJpegFiles, paths)[0], crops(ImageFiles, paths)[0])


@pytest.mark.parametrize("content", [b"", b"no image", None])
def test_a_damaged_file_is_named_or_skipped_as_on_the_host(
    paths: list[str], asked: list[int], content: bytes | None
):
    path = Path(paths[1])
    path.write_bytes(path.read_bytes()[:400] if content is None else content)
    with pytest.raises(DataError) as error:
        crops(NvJpegFiles, paths)
    assert str(error.value).startswith(str(path))
    found, labels = crops(NvJpegFiles, paths, "skip")
    expected, _ = crops(ImageFiles, paths, "skip")
    assert near(found, expected)
    assert labels.tolist() == [3, 0, 4, 3, 2, IGNORE_INDEX]


def test_without_a_decoder_on_the_gpu_there_is_no_run(
    paths: list[str], asked: list[int], monkeypatch: pytest.MonkeyPatch
):
    folder = ImageFolder(str(Path(paths[0]).parent.parent), 16, decoder="nvjpeg")
    train = folder.load(val=Duration(0, "percent"), seed=0).train
    assert isinstance(train, NvJpegFiles)
    assert isinstance(train.take(np.array([1])), NvJpegFiles)
    assert choose(train, kind="auto", crops=True).reason == "the GPU decodes"

    def lack(buffers: list[Tensor], device: torch.device) -> list[Tensor]:
        raise RuntimeError("decode_jpegs_cuda: torchvision not compiled with nvJPEG support")

    monkeypatch.setattr(nvjpeg, "decode_on_device", lack)
    with pytest.raises(MachineError, match=r"not compiled with nvJPEG support\. Use data\.decoder=cpu"):
        folder.load(val=Duration(0, "percent"), seed=0)


@pytest.mark.gpu("nvJPEG")
def test_a_gpu_gives_the_crops_of_the_host_up_to_its_decoder(paths: list[str]):
    nvjpeg.check_decoder()
    found, _ = crops(NvJpegFiles, paths)
    assert found.is_cuda
    assert near(found.cpu(), crops(ImageFiles, paths)[0], 4)
