"""Tar shards and iterable data that cannot be trained on, and what has to be said of them."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

from bad_data import DATA, OWN, BadData, image

STREAM = OWN.replace("their_sets", "their_streams")
SHARDS = "data=webdataset model=mlp batch_size=4 epochs=1 data.val=0 data.shards=shards"

STREAMS = """
import os
import torch
from torch.utils.data import IterableDataset, get_worker_info

class Stream(IterableDataset):
    num_classes = 2
    size, shape = 24, (4,)
    def __iter__(self):
        info = get_worker_info()
        for index in range(info.id, self.size, info.num_workers):
            yield self.read(index), index % 2
    def read(self, index):
        return torch.ones(self.shape)

class NoStream(Stream):
    size = 0

class ShardedStream(Stream):
    num_shards = 3

class RaisingStream(Stream):
    def read(self, index):
        if index == 2:
            raise ValueError("no such sample")
        return super().read(index)

class DyingStream(Stream):
    def read(self, index):
        if index > 1:
            os._exit(3)
        return super().read(index)

class LargeStream(Stream):
    shape = (100000,)
"""


def _streams() -> None:
    Path("their_streams.py").write_text(STREAMS)


def _stream(name: str, code: str, *says: str, more: str = "") -> BadData:
    loader = "dataloader=workers " if "workers" in more else ""
    line = f"{STREAM}{name} {loader}{more}".replace("epochs=1", "steps=20")
    return BadData(_streams, line, code, says)


def picture() -> bytes:
    """A small image as a file."""
    image(Path("picture.png"))
    content = Path("picture.png").read_bytes()
    Path("picture.png").unlink()
    return content


def shard(*files: tuple[str, bytes], name: str = "0") -> Path:
    """A tar of `files` in `shards`."""
    path = Path("shards", f"{name}.tar")
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for file, content in files:
            member = tarfile.TarInfo(file)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def good_shard(name: str = "0") -> Path:
    """A shard of four samples of two classes."""
    each = picture()
    return shard(
        *((f"{n}.{s}", c) for n in range(4) for s, c in (("cls", b"01"[n % 2 :][:1]), ("png", each))),
        name=name,
    )


def _cut_shard(size: int) -> None:
    content = good_shard().read_bytes()
    Path("shards/0.tar").write_bytes(content[:size])


def _zipped_shard() -> None:
    path = good_shard()
    path.write_bytes(gzip.compress(path.read_bytes()))


def _other_classes() -> None:
    shard(*((f"{n}.{s}", c) for n in range(4) for s, c in (("txt", b"cd"[n % 2 :][:1]), ("png", picture()))))
    shard(("0.txt", b"cow"), ("0.png", picture()), name="val")


CASES: dict[str, BadData] = {
    "shards that are not there": BadData(
        good_shard,
        f"{SHARDS}/0{{0..3}}.tar",
        "D001",
        ("data.shards=shards/0{0..3}.tar (command line): no such file: shards/00.tar", "Set data.shards="),
    ),
    "a folder without shards": BadData(
        Path("shards").mkdir, SHARDS, "D001", ("data.shards=shards (command line): contains no .tar files",)
    ),
    "a shard that is not there": BadData(
        lambda: (good_shard(), Path("shards/1.tar").symlink_to("nowhere")),
        SHARDS,
        "D001",
        ("shards/1.tar: cannot be read: No such file or directory",),
    ),
    "an empty shard": BadData(
        lambda: (good_shard(), shard(name="1")),
        SHARDS,
        "D002",
        ("shards/1.tar: contains no samples. Leave it out",),
    ),
    "a shard cut off within an image": BadData(
        lambda: _cut_shard(1600),
        SHARDS,
        "D005",
        ("shards/0.tar: is truncated: ", "Make the shard anew"),
    ),
    "a shard cut off behind an image": BadData(
        lambda: _cut_shard(2048),
        SHARDS,
        "D005",
        ("shards/0.tar: is truncated: the mark at its end is missing",),
    ),
    "a compressed shard": BadData(
        _zipped_shard, SHARDS, "D005", ("shards/0.tar: is compressed", "Unpack it to a plain .tar")
    ),
    "text named .tar": BadData(
        lambda: good_shard().write_text("no tar at all " * 99),
        SHARDS,
        "D005",
        ("shards/0.tar: is not a tar file, despite its name",),
    ),
    "a sample of two images": BadData(
        lambda: shard(("7.cls", b"1"), ("7.left.jpg", b"1"), ("7.right.jpg", b"1")),
        SHARDS,
        "D005",
        ("shards/0.tar: sample 7 has several images: left.jpg, right.jpg",),
    ),
    "a sample without an image": BadData(
        lambda: shard(("7.cls", b"1"), ("7.wav", b"1")),
        SHARDS,
        "D005",
        ("shards/0.tar: sample 7 has no image, but cls, wav",),
    ),
    "a sample without a label": BadData(
        lambda: shard(("7.png", picture())),
        SHARDS,
        "D005",
        ("shards/0.tar: sample 7 has no label in a file .cls",),
    ),
    "a class in held-out shards only": BadData(
        _other_classes,
        f"{SHARDS}/0.tar data.val_shards=shards/val.tar",
        "D004",
        ("label cow does not occur in training",),
    ),
    "a stream without samples": _stream("NoStream", "D002", DATA, "the iterable dataset yields no samples"),
    "a stream without steps": BadData(
        _streams,
        f"{STREAM}Stream",
        "C016",
        ("steps (conf/config.yaml:", "the number of steps is unknown", "set for example steps=1000"),
    ),
    "a stream that raises": _stream(
        "RaisingStream",
        "D008",
        "data._target_=their_streams.",
        "__iter__ raises ValueError (their_streams.py:",
        "no such sample",
    ),
    "the same in a worker": _stream(
        "RaisingStream",
        "D008",
        "data._target_=their_streams.",
        "__iter__ raises ValueError",
        more="dataloader.workers=2",
    ),
    "a stream's worker that dies": _stream(
        "DyingStream",
        "D008",
        "dataloader.workers=2 (command line): a worker process died: exit code 3",
        "The dataset ended its process",
        more="dataloader.workers=2",
    ),
    "more workers than shards": _stream(
        "ShardedStream",
        "C011",
        "dataloader.workers=4 (command line): 4 data workers, and the dataset has 3 shards to give them",
        "Use dataloader.workers=3",
        more="dataloader.workers=4",
    ),
    "a stream in memory": _stream(
        "Stream",
        "C011",
        "dataloader.kind=memory (conf/dataloader/memory.yaml:",
        "Use dataloader=auto",
        more="dataloader=memory",
    ),
}
