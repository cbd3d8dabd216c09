"""Data that cannot be trained on, made in the current folder, and what has to be said of it."""

from __future__ import annotations

import io
import os
import struct
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from ptfast.cli.command_line import run

IMAGES = "data=imagefolder data.root=images model=mlp batch_size=4 epochs=1"
PACKED = "data=imagefolder data.root=pack model=mlp batch_size=4 epochs=1"
ARRAYS = "data=arrays data.path=arrays.npz model=mlp batch_size=4 epochs=1"
OWN = "data=custom model=mlp batch_size=4 epochs=1 data.val=0 data._target_=their_sets."

THEIR_SETS = """
import os
import sys
import torch
from torch.utils.data import Dataset, get_worker_info

class Good(Dataset):
    num_classes = 2
    label = 1
    def __len__(self):
        return 24
    def __getitem__(self, index):
        return torch.ones(4), self.label if index == 20 else index % 2

class Above(Good):
    label = 7

class Below(Good):
    label = -1

class Ignored(Good):
    def __getitem__(self, index):
        return torch.ones(4), -100

class Unmade(Good):
    def __init__(self):
        raise RuntimeError("no such base")

class Unmeasured(Good):
    def __len__(self):
        raise RuntimeError("nobody knows")

class Named(Good):
    def __getitem__(self, index):
        return torch.ones(4), "cat"

class Empty(Good):
    def __len__(self):
        return 0

class Unpicklable(Good):
    def __init__(self):
        self.change = lambda x: x

class Odd(Exception):
    def __init__(self, first, second):
        super().__init__(first)
        self.function = lambda: second

class Raises(Good):
    def __getitem__(self, index):
        if index == 20:
            raise Odd("no such sample", 1)
        return super().__getitem__(index)

class Quits(Good):
    def __getitem__(self, index):
        sys.exit(0)

class Dies(Good):
    def __getitem__(self, index):
        if get_worker_info() is not None:
            os._exit(3)
        return super().__getitem__(index)
"""


@dataclass(frozen=True)
class BadData:
    """One dataset that is refused.

    Args:
        make: makes it in the current folder.
        line: the words after `ptfast train`.
        code: the code in the message.
        says: texts that the message contains.
    """

    make: Callable[[], object]
    line: str
    code: str
    says: tuple[str, ...]


def image(path: Path, mode: str = "RGB", size: tuple[int, int] = (8, 8)) -> None:
    """Write an image of noise; mode `I;16` has 16 bits."""
    noise = np.random.default_rng(len(path.name)).integers(0, 256, (*size, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    if mode == "I;16":
        Image.fromarray(noise[..., 0].astype(np.uint16) * 257).save(path)
    else:
        Image.fromarray(noise).convert(mode).save(path)


def class_folders(*classes: str, split: str = "train", each: int = 6) -> Path:
    """Class folders of small images in `images/<split>`; returns the first image."""
    for name in classes:
        for number in range(each):
            image(Path("images", split, name, f"{number}.jpg"))
    return Path("images", split, classes[0], "0.jpg")


def arrays(labels: list[int], size: int | None = None, features: int = 4) -> None:
    """`arrays.npz` with such labels, of features or of images with sides of `size`."""
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(len(labels), features)).astype(np.float32)
    if size is not None:
        inputs = draw.integers(0, 256, (len(labels), size, size, 3), dtype=np.uint8)
    np.savez("arrays.npz", train_x=inputs, train_y=np.array(labels))


def archive(path: Path, *members: tuple[str, bytes | str]) -> None:
    """A tar of files (bytes) and links (text)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def _with(change: Callable[[Path], object]) -> Callable[[], object]:
    """Class folders of which one image has been changed."""
    return lambda: change(class_folders("cat", "dog"))


def _nothing() -> None:
    pass


def _bomb(path: Path) -> None:
    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    rows = chunk(b"IDAT", zlib.compress(bytes(1000)))
    path.with_suffix(".png").write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + rows + chunk(b"IEND", b"")
    )


def _split_classes() -> None:
    class_folders("cat", "dog")
    class_folders("cat", "cow", split="val")


def _all_empty() -> None:
    for path in class_folders("cat", "dog").parents[1].rglob("*.*"):
        path.write_bytes(b"")


def _empty_class() -> None:
    class_folders("cat", "dog")
    Path("images/train/emu").mkdir()


def _their_sets() -> None:
    Path("their_sets.py").write_text(THEIR_SETS)


def _pack(harm: Callable[[], object]) -> Callable[[], None]:
    """A pack of two classes in `pack`, and what goes wrong with it."""

    def make() -> None:
        class_folders("cat", "dog")
        assert run(["pack", "images", "pack", "--workers", "1"]) == 0
        harm()

    return make


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _own(name: str, code: str, *says: str, more: str = "") -> BadData:
    return BadData(_their_sets, f"{OWN}{name} {more}", code, says)


ROOT = "data.root=images (command line):"
FILE = "images/train/cat/0.jpg:"
WORKERS = "dataloader=workers dataloader.workers=1"
DATA = "data (command line):"
TARGET = "data._target_=their_sets."

# By the number of the case in the list of bad inputs.
CASES: dict[str, BadData] = {
    "33 no such folder": BadData(_nothing, IMAGES, "D001", (ROOT, "no such folder", "Set data.root")),
    "33 no such arrays": BadData(
        _nothing, ARRAYS, "D001", ("data.path=arrays.npz (command line): no such file",)
    ),
    "33 no such text": BadData(
        _nothing,
        "data=text_tsv data.root=text model=text_encoder",
        "D001",
        ("data.root=text (command line):",),
    ),
    "33 no such file of text": BadData(
        _nothing, "data=text_file data.path=x.txt model=gpt", "D001", ("data.path=x.txt (command line):",)
    ),
    "34 a file for a folder": BadData(
        lambda: Path("images").write_text("x"),
        IMAGES,
        "D001",
        (ROOT, "is a file, not a folder", "Set data.root"),
    ),
    "35 an empty folder": BadData(Path("images").mkdir, IMAGES, "D002", (ROOT, "is an empty folder")),
    "36 one class": BadData(
        lambda: class_folders("cat"), IMAGES, "D003", ("contains one class only (cat)", "a folder of its own")
    ),
    "37 an empty class": BadData(
        _empty_class, IMAGES, "D003", ("images/train/emu: class folder without images", "or remove it")
    ),
    "38 other classes": BadData(
        _split_classes,
        IMAGES,
        "D003",
        ("images/val: its classes differ", "cow", "lacks dog", "the same class folders"),
    ),
    "39 a label above": BadData(
        lambda: arrays([0, 1, 2, 7] * 6),
        f"{ARRAYS} data.num_classes=3",
        "D004",
        (DATA, "label 7 at train sample 3, but there are 3 classes", "Labels run from 0 to 2"),
    ),
    "39 a label above, their own": _own(
        "Above", "D004", DATA, "label 7 at sample 20", "Labels run from 0 to 1"
    ),
    "40 a label below": BadData(
        lambda: arrays([0, 1, -1, 1] * 6), ARRAYS, "D004", (DATA, "label -1 at train sample 2", "from 0")
    ),
    "40 a label below, their own": _own("Below", "D004", DATA, "label -1 at sample 20"),
    "41 all ignored": BadData(
        lambda: arrays([-100] * 24), ARRAYS, "D004", (DATA, "every label of the train split is -100")
    ),
    "41 all ignored, their own": _own("Ignored", "D004", DATA, "every label of the train split is -100"),
    "42 half a JPEG": BadData(
        _with(lambda path: path.write_bytes(path.read_bytes()[:300])),
        IMAGES,
        "D005",
        (
            f"{FILE} is damaged or truncated: Image is incomplete or truncated",
            "Replace the file, remove it, or leave such files out with data.on_corrupt=skip",
        ),
    ),
    "43 an empty file": BadData(
        _with(lambda path: path.write_bytes(b"")),
        IMAGES,
        "D005",
        (f"{FILE} is empty (0 bytes)", "Replace the file"),
    ),
    "43 nothing to show in place of an empty file": BadData(
        _all_empty,
        f"{IMAGES} data.on_corrupt=skip",
        "D005",
        ("cannot be decoded, and neither can any other file",),
    ),
    "44 text named .jpg": BadData(
        _with(lambda path: path.write_text("no image at all")),
        IMAGES,
        "D005",
        (f"{FILE} is not an image that can be decoded, despite its name", "Replace the file"),
    ),
    "an unfinished pack": BadData(
        _pack(lambda: Path("pack/manifest.json").rename("pack/pack.unfinished")),
        PACKED,
        "D007",
        ("data.root=pack (command line): is an unfinished pack", "Make it with ptfast pack"),
    ),
    "a damaged pack": BadData(
        _pack(lambda: _flip(Path("pack/train.bin"))),
        PACKED,
        "D007",
        ("pack/train.bin: does not have the checksum", "make it anew with ptfast pack"),
    ),
    "a pack cut short": BadData(
        _pack(lambda: os.truncate("pack/train.bin", 100)),
        PACKED,
        "D007",
        ("pack/train.bin: has 100 bytes where the manifest says",),
    ),
    "a changed source": BadData(
        _pack(lambda: Path("images/train/cat/0.jpg").unlink()),
        PACKED,
        "D007",
        ("data.root=pack (command line): was packed from", "which has changed since", "Pack it again"),
    ),
    "a pack of which files are to be skipped": BadData(
        _pack(lambda: None),
        f"{PACKED} data.on_corrupt=skip",
        "C011",
        ("data.on_corrupt=skip (command line): the pack has left out", "ptfast pack --on-corrupt skip"),
    ),
    "what is no pack": BadData(
        lambda: class_folders("cat", "dog"),
        f"{IMAGES} dataloader=packed",
        "C011",
        ("dataloader.kind=packed", "ptfast pack images images-packed"),
    ),
    "a link to nothing": BadData(
        _with(lambda path: path.with_name("z.jpg").symlink_to("nowhere")),
        IMAGES,
        "D005",
        ("images/train/cat/z.jpg", "cannot be read: No such file or directory"),
    ),
    "labels that are no classes": BadData(
        lambda: arrays([0, 1, 10**9] * 4),
        ARRAYS,
        "D004",
        ("12 labels go up to 1,000,000,000", "Number the classes from 0"),
    ),
    "objects for labels": BadData(
        lambda: np.savez("arrays.npz", x=np.zeros((9, 2)), y=np.array([None] * 9)),
        ARRAYS,
        "D005",
        ("data.path=arrays.npz", "contains Python objects in place of numbers"),
    ),
    "46 a bomb": BadData(
        _with(_bomb), IMAGES, "D005", ("cat/0.png: claims 2,500,000,000 pixels", "not decoded")
    ),
    "47 less than a batch": BadData(
        lambda: arrays([0, 1] * 8),
        "data=arrays data.path=arrays.npz batch_size=64 dataloader.drop_last=true",
        "D006",
        (
            "batch_size=64 (command line): 14 training samples do not fill one batch",
            "Use batch_size=14 or less",
        ),
    ),
    "48 a batch of one": BadData(
        lambda: arrays([0, 1] * 6 + [1], size=8),
        "data=arrays data.path=arrays.npz data.val=0 model=resnet20 batch_size=4 dataloader.drop_last=false",
        "D006",
        (
            "batch_size=4 (command line): 13 samples leave a last micro-batch of 1",
            "Set dataloader.drop_last=true",
        ),
    ),
    "a dataset that cannot be made": _own(
        "Unmade", "D008", TARGET, "its constructor raises RuntimeError (their_sets.py:", "no such base"
    ),
    "a dataset without a length": _own(
        "Unmeasured", "D008", TARGET, "__len__ raises RuntimeError (their_sets.py:", "): nobody knows"
    ),
    "labels that are names": _own(
        "Named", "D003", DATA, "every training label is cat, so there is nothing to classify"
    ),
    "53 an error that no pipe carries": _own(
        "Raises", "D008", TARGET, "__getitem__ raises Odd (their_sets.py:", "): no such sample"
    ),
    "53 the same in a worker": _own(
        "Raises",
        "D008",
        TARGET,
        "__getitem__ raises Odd (their_sets.py:",
        more=f"{WORKERS} log_every=50steps",
    ),
    "53 a worker that dies": _own(
        "Dies",
        "D008",
        "dataloader.workers=1 (command line): a worker process died: exit code 3",
        "The dataset ended its process",
        more=WORKERS,
    ),
    "a dataset that leaves": _own("Quits", "D008", TARGET, "__getitem__ raises SystemExit (their_sets.py:"),
    "labels of another task": BadData(
        lambda: arrays([0, 1] * 12),
        f"{ARRAYS} task=multilabel",
        "C011",
        ("task=multilabel (command line): this data's labels are for task=classification", "task=auto"),
    ),
    "no samples of their own": _own("Empty", "D002", DATA, "Empty has no samples"),
}
