"""Tar shards: what is read out of them, the same batches from every loader, and orders that stay nearby."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import Capture
from running import same_bits, summary, train, weights
from test_custom_dataset import loader
from torch import Tensor

from ptfast.core.auto_choices import read_choices
from ptfast.core.durations import Duration
from ptfast.core.errors import DataError
from ptfast.core.machine import cache_folder
from ptfast.data.build_data import build_data
from ptfast.data.loaders.loader_choice import choose
from ptfast.data.sources.webdataset_shards import Members, WebDataset, expand, nearby
from ptfast.data.streams.shard_index import members

pytestmark = pytest.mark.usefixtures("in_tmp")
SIZES = (5, 9, 3, 7)


def picture(number: int, size: tuple[int, int] = (8, 6)) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def shard(path: Path, files: Sequence[tuple[str, bytes]], kind: int = tarfile.USTAR_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=kind) as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def sample(number: int, label: bytes | None = None, kind: str = "cls") -> list[tuple[str, bytes]]:
    label = str(number % 3).encode() if label is None else label
    return [(f"{number:06d}.{kind}", label), (f"{number:06d}.png", png(picture(number)))]


def shards(sizes: Sequence[int] = SIZES, folder: str = "shards") -> None:
    """Shards of so many samples, numbered through."""
    first = 0
    for number, size in enumerate(sizes):
        files = [file for n in range(first, first + size) for file in sample(n)]
        shard(Path(folder, f"train-{number:03d}.tar"), files)
        first += size


def load(pattern: Any = "shards/train-{000..003}.tar", **options: Any) -> Any:
    given = {name: options.pop(name) for name in ("shuffle_buffer", "choose") if name in options}
    dataset = WebDataset(pattern, **options)
    return build_data(dataset, val=Duration(0, "percent"), seed=0, task="auto", **given)


def fetched(source: Any) -> tuple[Tensor, Tensor]:
    return source.fetch(np.arange(len(source)))


def test_images_and_labels_are_those_of_the_files() -> None:
    shards()
    data = load()
    images, labels = fetched(data.train)
    assert np.array_equal(images.numpy(), np.stack([picture(number) for number in range(sum(SIZES))]))
    assert labels.tolist() == [number % 3 for number in range(sum(SIZES))]
    info = data.info
    assert (info.num_classes, info.class_names, info.input_shape) == (3, None, (3, 8, 6))
    assert "24 train" in data.note
    assert "4 shards" in data.note


@pytest.mark.parametrize(
    ("kind", "texts", "names", "labels"),
    [
        ("cls", ["2", "0", "1"], None, [2, 0, 1]),
        ("cls", ["dog", "cat", "dog"], ("cat", "dog"), [1, 0, 1]),
        ("txt", ["a dog", "7", "cat\n"], ("7", "a dog", "cat"), [1, 0, 2]),
        ("json", ['{"label": 1}', '{"cls": 0}', "2"], None, [1, 0, 2]),
        ("json", ['{"class": "b"}', '"a"', '{"label": "b"}'], ("a", "b"), [1, 0, 1]),
    ],
)
def test_labels_are_numbers_or_names(
    kind: str, texts: list[str], names: tuple[str, ...] | None, labels: list[int]
) -> None:
    shard(Path("a.tar"), [file for n, text in enumerate(texts) for file in sample(n, text.encode(), kind)])
    data = load("a.tar")
    assert data.info.class_names == names
    assert fetched(data.train)[1].tolist() == labels


def test_held_out_classes_that_training_has_not_are_named() -> None:
    shard(Path("numbers.tar"), [*sample(0), *sample(1)])
    shard(Path("names.tar"), [*sample(2, b"cat", "txt"), *sample(3, b"cow", "txt")])
    shard(Path("others.tar"), sample(2, b"dog", "txt"))
    with pytest.raises(DataError, match=r"data.val_shards: contains the class cat") as caught:
        load("numbers.tar", val_shards="names.tar")
    assert caught.value.code == "D003"
    with pytest.raises(DataError, match="label dog does not occur in training") as caught:
        load("names.tar", val_shards="others.tar")
    assert caught.value.code == "D004"


def test_captions_are_no_classes() -> None:
    texts = [f"a dog that runs {number}" for number in range(12)]
    shard(Path("a.tar"), [file for n, text in enumerate(texts) for file in sample(n, text.encode(), "txt")])
    with pytest.raises(DataError, match=r"12 of 12 training labels differ, as captions do \(a dog") as caught:
        load("a.tar")
    assert caught.value.code == "D004"
    shard(Path("b.tar"), [file for n in range(12) for file in sample(n, str(10**9 + n).encode())])
    with pytest.raises(DataError, match="12 labels go up to 1,000,000,011"):
        load("b.tar")


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tars_of_every_kind_are_read_as_tarfile_reads_them(kind: int) -> None:
    files = [(f"{'x' * 90}/{number}/{'y' * 40}.bin", bytes([number]) * (500 + number)) for number in range(9)]
    files[4:4] = [("übung.bin", b"1" * 512)]
    files[:0] = [("short.bin", b""), ("aligned.bin", b"1" * 1024)]
    path = shard(Path("a.tar"), files, kind)
    with tarfile.open(path, "a") as tar:
        tar.add(".", "folder", recursive=False)
    with tarfile.open(path) as tar:
        expected = [(info.name, info.offset_data, info.size) for info in tar if info.isfile()]
    assert [tuple(member) for member in members(path)] == expected


@pytest.mark.parametrize("kind", [b"0", b"Z"])
@pytest.mark.parametrize(
    "size", [b"-0000001000\0", b"zzz".ljust(12, b"\0"), b"\xff" * 12, b"\xff" * 11 + b"\0"]
)
def test_a_size_that_is_none_is_refused(size: bytes, kind: bytes) -> None:
    content = bytearray(shard(Path("a.tar"), sample(0)).read_bytes())
    content[124:136], content[156:157] = size, kind
    content[148:156] = f"{sum(content[:148]) + sum(content[156:512]) + 8 * 32:06o}\0 ".encode()
    Path("a.tar").write_bytes(content)
    with pytest.raises(DataError, match=r"^a\.tar: ") as caught:
        load("a.tar")
    assert caught.value.code == "D005"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (sample(7) + sample(7), "sample 000007 has two files .cls"),
        (sample(7, b"1" * 5000), "sample 000007 has no label"),
        (sample(7, b"[" * 100_000, "json"), "sample 000007 has no label"),
    ],
)
def test_labels_and_names_that_do_not_serve(files: Any, says: str) -> None:
    shard(Path("a.tar"), [*sample(3), *files])
    with pytest.raises(DataError, match=says) as caught:
        load("a.tar")
    assert caught.value.code == "D005"


def test_what_lies_where_is_read_once_until_a_shard_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTFAST_CACHE", "cache")
    shards()
    before, read = fetched(load().train), []

    def noticed(path: Path) -> Any:
        read.append(path.name)
        return members(path)

    monkeypatch.setattr("ptfast.data.streams.shard_index.members", noticed)
    assert all(torch.equal(a, b) for a, b in zip(before, fetched(load().train), strict=True))
    assert read == []
    # Another sample, another time of change at the same size, and an entry that was damaged.
    shard(Path("shards/train-001.tar"), [*sample(90), *sample(91)])
    os.utime("shards/train-002.tar", ns=(1, 1))
    changed = load().train
    assert read == ["train-001.tar", "train-002.tar"]
    assert len(changed) == sum(SIZES) - SIZES[1] + 2
    assert np.array_equal(fetched(changed)[0][SIZES[0]].numpy(), picture(90))
    for entry in (cache_folder() / "shards").iterdir():
        entry.write_bytes(entry.read_bytes()[:-40])
    assert len(load().train) == len(changed)
    assert read[2:] == [f"train-{number:03d}.tar" for number in range(4)]


def test_patterns_stand_for_their_shards() -> None:
    for name in ("t-08", "t-09", "t-10", "v-0"):
        shard(Path("s", f"{name}.tar"), sample(0))

    def names(pattern: Any) -> list[str]:
        return [Path(place).stem for place in expand(pattern, "data.shards", [])]

    assert names("s/t-{08..10}.tar") == ["t-08", "t-09", "t-10"]
    assert names("s/{t-08,v-0}.tar") == ["t-08", "v-0"]
    assert names("s/t-*.tar") == ["t-08", "t-09", "t-10"]
    assert names("s") == ["t-08", "t-09", "t-10", "v-0"]
    assert names(["s/v-0.tar", "s/t-{9..10..1}.tar"][:1]) == ["v-0"]
    # Down, and padded, as a shell does.
    assert names("s/t-{10..08}.tar") == ["t-10", "t-09", "t-08"]
    assert expand("s3://b/{8..010}-{0..10..2}{2..1}", "", []) == [
        f"s3://b/0{n:02}-{{0..10..2}}{m}" for n in (8, 9, 10) for m in (2, 1)
    ]
    with pytest.raises(DataError, match=r"no such file: s/t-11.tar") as caught:
        names("s/t-{10..11}.tar")
    assert (caught.value.code, caught.value.key) == ("D001", "data.shards")


@pytest.mark.parametrize("shuffle_buffer", [None, 4])
def test_every_loader_gives_the_same_batches(shuffle_buffer: int | None) -> None:
    shards()
    options = {"shuffle_buffer": shuffle_buffer}
    crop_flip = {"crop_padding": 2, "flip": True}

    def batches(kind: str, **changes: Any) -> list[Any]:
        held = {"choose": lambda train, others: choose(train, others, kind=kind)} if kind == "memory" else {}
        built = loader(load(**options, **held), kind, augment=crop_flip, **changes)
        found = [batch.data for step in built.steps(0, 7) for batch in step.micro_batches]
        built.close()
        return found

    plain = batches("plain")
    assert same_bits(batches("workers", workers=2), plain)
    assert same_bits(batches("memory"), plain)
    ranks = [batches("plain", rank=rank, world_size=2) for rank in (0, 1)]
    assert same_bits([batch for pair in zip(*ranks, strict=True) for batch in pair], plain)


def test_an_order_nearby_has_every_sample_once_and_stays_nearby() -> None:
    of = np.repeat(np.arange(20), 50)
    orders = [nearby(0, epoch, of, 30) for epoch in (0, 1)]
    for order in orders:
        assert sorted(order) == list(range(1000))
        # Shards follow one another: a window contains samples of two or three.
        assert max(len(set(of[order[i : i + 50]])) for i in range(0, 1000, 50)) <= 3
        firsts = [of[order[i]] for i in range(25, 1000, 50)]
        assert len(set(firsts)) >= 18
    assert not np.array_equal(*orders)
    assert np.array_equal(orders[0], nearby(0, 0, of, 30))
    in_order = nearby(0, 0, of, 1)
    assert all(np.array_equal(np.diff(run), np.ones(49)) for run in in_order.reshape(20, 50))


def test_a_buffer_keeps_the_order_nearby_in_what_is_held_out_too() -> None:
    shards()
    data = build_data(WebDataset("shards"), val=Duration(6, "samples"), seed=0, task="auto", shuffle_buffer=1)
    assert (len(data.train), len(data.val or ())) == (18, 6)
    order = data.order(0, 0)
    assert order is not None
    assert sorted(order) == list(range(18))
    train: Any = data.train
    of = train.paths.shards[order]
    assert np.count_nonzero(np.diff(of)) == 3


def test_names_are_held_as_arrays() -> None:
    shards()
    train: Any = load().train
    assert isinstance(train.paths, Members)
    again = pickle.loads(pickle.dumps(train))
    assert same_bits(fetched(again), fetched(train))
    assert str(again.paths[5]) == "shards/train-001.tar/000005.png"
    assert again.paths[5].read(8) == b"\x89PNG\r\n\x1a\n"


def test_files_that_are_no_images_are_named_or_skipped() -> None:
    files = [file for number in range(6) for file in sample(number)]
    files[7] = (files[7][0], files[7][1][:60])
    shard(Path("a.tar"), files)
    with pytest.raises(DataError, match=r"a.tar/000003.png: is damaged or truncated") as caught:
        fetched(load("a.tar").train)
    assert caught.value.code == "D005"
    images, labels = fetched(load("a.tar", on_corrupt="skip").train)
    assert labels.tolist() == [0, 1, 2, -100, 1, 2]
    assert torch.equal(images[3], images[4])


def test_boxes_are_cut_out_of_the_original_images() -> None:
    pictures = [picture(number, (20 + number, 30)) for number in range(4)]
    files = [file for n in range(4) for file in (sample(n)[0], (f"{n:06d}.png", png(pictures[n])))]
    shard(Path("a.tar"), files)
    train = load("a.tar", image_size=8).train
    heights, widths = train.sizes(np.arange(4))
    assert (heights.tolist(), widths.tolist()) == ([20, 21, 22, 23], [30] * 4)
    whole = np.tile(np.array([0.0, 0.0, 1.0, 1.0]), (4, 1))
    assert train.crops(np.arange(4), whole, 8, np.zeros(4, np.int64)).shape == (4, 8, 8, 3)


def test_a_run_trains_and_resumes_at_once(capsys: Capture) -> None:
    shards((12, 9, 3, 8))
    shards((6,), "val")
    words = ("data=webdataset", "data.shards=shards", "data.val_shards=val", "data.shuffle_buffer=8")
    words = (*words, "model=mlp", "model.hidden=[4]", "batch_size=8", "augment=crop_flip", "epochs=3")
    words = (*words, "saving.every=1epochs", "dataloader=plain", "schedule=constant")
    assert train(*words, "run.dir=whole") == 0
    out = capsys.readouterr().out
    assert "32 train, 6 val; in 5 shards" in out
    assert "each sample is drawn out of 8 that lie together" in out
    assert train(*words, "epochs=2", "run.dir=parts") == 0
    assert train(*words, "run.dir=parts", "run.resume=auto") == 0
    assert same_bits(weights(Path("parts")), weights(Path("whole")))
    assert summary(Path("whole"))["steps"] == 12
    assert read_choices(Path("whole"))["dataloader.kind"].value == "plain"
