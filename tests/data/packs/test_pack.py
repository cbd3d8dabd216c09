"""Packs of images: what is in them is what was in the folder, and what is not whole is never taken for it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from packs import HALF, NO_VAL, files_of, load, mixed, pack, refused, same, tree, write

from ptfast.cli.command_line import run
from ptfast.core.errors import DataError
from ptfast.data.decoding.image_decoding import decode_file
from ptfast.data.decoding.pictures import resize_shorter
from ptfast.data.loaders.shared_memory import SharedArrays
from ptfast.data.map_source import MapSource
from ptfast.data.packs import pack_reader
from ptfast.data.packs.pack_sources import plan_images
from ptfast.data.packs.pack_writer import make
from ptfast.data.packs.packed_images import PackedImages
from ptfast.data.sources.image_files import ImageFiles
from ptfast.data.transforms.resized_crops import draw_boxes

__all__ = ["mixed", "tree"]


@pytest.mark.parametrize("jpeg", [False, True])
def test_a_pack_is_the_folder_it_was_made_from(tree: Path, tmp_path: Path, jpeg: bool):
    pack(tree, tmp_path / "pack", jpeg=jpeg)
    for val in (NO_VAL, HALF):
        folder, found = load(tree, val), load(tmp_path / "pack", val)
        assert found.info.class_names == ("cat", "dog")
        assert found.info.input_shape == (3, 12, 12)
        for split in ("train", "val", "test"):
            one, other = getattr(folder, split), getattr(found, split)
            assert (one is None) == (other is None)
            if one is not None:
                indices = np.random.default_rng(0).permutation(len(one))
                assert same(one.fetch(indices), other.fetch(indices))
        # The same bits: samples that are held out do not count.
        assert found.info.extra["normalize"] == folder.info.extra["normalize"]


def test_the_manifest_says_what_is_in_it(tree: Path, tmp_path: Path):
    manifest = pack(tree, tmp_path / "pack")
    assert pack_reader.read_manifest(tmp_path / "pack") == manifest
    assert manifest.splits == ["train", "test"]
    assert manifest.data_bytes == 14 * 12 * 12 * 3
    assert [(name, *facts[:2]) for name, facts in manifest.source.contents.items()] == [
        *(("train/cat", 5, "files"), ("train/dog", 5, "files")),
        *(("test/cat", 2, "files"), ("test/dog", 2, "files")),
    ]
    assert manifest.statistics == load(tree).info.extra["normalize"]
    assert sorted(files_of(tmp_path / "pack")) == [
        *("manifest.json", "test.bin", "test.index", "train.bin", "train.index")
    ]


def test_processes_write_what_one_writes(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pack(tree, tmp_path / "one")
    monkeypatch.setattr("ptfast.data.packs.pack_sources.IMAGE_BYTES", 12 * 12 * 3)
    pack(tree, tmp_path / "many", workers=2)
    assert len(plan_images(tree, size=None, jpeg=False, skip_corrupt=False).jobs) == 14
    assert files_of(tmp_path / "many") == files_of(tmp_path / "one")
    assert len(load(tmp_path / "many").train) == 10


def test_images_of_all_sizes_are_brought_to_one_as_they_are_fetched(mixed: Path, tmp_path: Path):
    pack(mixed, tmp_path / "pack")
    folder, found = load(mixed, image_size=10), load(tmp_path / "pack", image_size=10)
    indices = np.arange(9)[::-1].copy()
    assert same(folder.train.fetch(indices), found.train.fetch(indices))
    assert found.info.extra["normalize"] == folder.info.extra["normalize"]
    assert "3 images that are not 8-bit RGB were converted" in found.note
    with pytest.raises(DataError, match=r"of .*train.bin.*data.image_size=") as caught:
        load(tmp_path / "pack")
    assert caught.value.code == "D005"


def test_crops_are_those_of_the_files(mixed: Path, tmp_path: Path):
    paths = [str(path) for name in "ab" for path in sorted((mixed / name).iterdir())]
    files = ImageFiles(paths, torch.zeros(9, dtype=torch.long))
    indices = np.array([3, 0, 8, 5])
    sizes = files.sizes(indices)
    boxes = draw_boxes(0, 1, indices, *sizes, (0.08, 1.0), (0.75, 1.3333))
    mirrored = np.array([0, 1, 0, 1])
    expected = files.crops(indices, boxes, 8, mirrored)
    for jpeg in (False, True):
        manifest = pack(mixed, tmp_path / f"pack{jpeg}", jpeg=jpeg)
        source = PackedImages(tmp_path / f"pack{jpeg}", "train", manifest, None)
        assert all(np.array_equal(*pair) for pair in zip(source.sizes(indices), sizes, strict=True))
        assert torch.equal(source.crops(indices, boxes, 8, mirrored), expected)


def test_a_size_shrinks_and_never_enlarges(mixed: Path, tmp_path: Path):
    manifest = pack(mixed, tmp_path / "pack", size=15)
    source = PackedImages(tmp_path / "pack", "train", manifest, None)
    paths = [path for name in "ab" for path in sorted((mixed / name).iterdir())]
    originals = [decode_file(str(path)).pixels for path in paths]
    for index, original in enumerate(originals):
        short = min(original.shape[:2])
        stored = source.original(index)
        assert min(stored.shape[:2]) == min(short, 15)
        smaller = original if short <= 15 else resize_shorter(torch.from_numpy(original), 15).numpy()
        assert np.array_equal(stored, smaller)
    heights, widths = source.sizes(np.arange(9))
    assert [*zip(heights, widths, strict=True)] == [image.shape[:2] for image in originals]
    assert "packed as pixels at 15" in load(tmp_path / "pack", image_size=9).note


def test_what_reaches_a_worker_is_no_copy_of_the_data(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import pickle

    monkeypatch.setattr("ptfast.data.map_source._CHUNK", 3)

    pack(tree, tmp_path / "pack")
    source = load(tmp_path / "pack").train
    before = source.fetch(np.arange(10))
    sent = pickle.dumps(source)
    assert (tmp_path / "pack" / "train.bin").read_bytes() not in sent
    assert same(pickle.loads(sent).fetch(np.arange(10)), before)
    assert same(MapSource.to_memory(source).fetch(np.arange(10)), before)
    assert source.take(np.arange(3)).storage == "pack"


def test_a_part_of_a_pack_is_held_where_ranks_hold_it_together(tree: Path, tmp_path: Path):
    pack(tree, tmp_path / "pack")
    source, places = load(tmp_path / "pack").train.take(np.array([7, 2, 5])), []

    class Noted(SharedArrays):
        def fill(self, shape: tuple[int, ...], fill: Callable[[Any], Any]) -> Any:
            places.append(super().fill(shape, fill))
            return places[-1]

    held = source.to_memory(Noted())
    assert same((held.inputs, held.targets), source.fetch(np.arange(3)))
    ((array, _),) = places
    assert all(np.shares_memory(array, column.numpy()) for column in (held.inputs, held.targets))


def test_a_run_keeps_the_pack_that_it_has_opened(tree: Path, tmp_path: Path):
    pack(tree, tmp_path / "pack")
    source = load(tmp_path / "pack").train
    before = source.fetch(np.arange(10))
    shutil.rmtree(tree / "test")
    pack(tree, tmp_path / "pack", size=6)
    assert not (tmp_path / "pack" / "test.bin").exists()
    assert same(source.fetch(np.arange(10)), before)
    assert load(tmp_path / "pack").info.input_shape == (3, 6, 6)


def test_threads_change_nothing(mixed: Path, tmp_path: Path):
    pack(mixed, tmp_path / "pack", jpeg=True)
    source = load(tmp_path / "pack", image_size=10).train
    indices = np.arange(9)
    boxes = np.tile([0.1, 0.2, 0.5, 0.6], (9, 1))
    threads = torch.get_num_threads()
    found = []
    for count in (1, 3):
        torch.set_num_threads(count)
        found.append((source.fetch(indices)[0], source.crops(indices, boxes, 6, indices % 2)))
    torch.set_num_threads(threads)
    assert same(*found)


def test_a_file_that_cannot_be_read_stops_it_or_is_left_out(tree: Path, tmp_path: Path):
    broken = tree / "train" / "dog" / "3.jpg"
    whole = load(tree).train.fetch(np.array([0, 1, 2, 3, 4, 5, 6, 7, 9]))
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(DataError, match=r"3\.jpg.*--on-corrupt skip"):
        pack(tree, tmp_path / "pack")
    assert "unfinished" in str(refused(tmp_path / "pack"))
    manifest = pack(tree, tmp_path / "pack", skip_corrupt=True)
    assert [file["file"] for file in manifest.skipped] == [str(broken)]
    data = load(tmp_path / "pack")
    assert same(data.train.fetch(np.arange(9)), whole)
    assert "without 1 file that could not be read" in data.note
    for path in (tree / "train" / "cat").iterdir():
        path.write_bytes(b"no image")
    with pytest.raises(DataError, match="none of the train images of cat"):
        pack(tree, tmp_path / "other", skip_corrupt=True)


def test_one_that_was_interrupted_is_made_anew(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ptfast.data.packs.pack_sources.IMAGE_BYTES", 2 * 12 * 12 * 3)
    pack(tree, tmp_path / "whole")
    wanted = {"size": None, "jpeg": False, "skip_corrupt": False}
    folder = tmp_path / "pack"

    def interrupt(samples: int) -> None:
        if samples >= 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(plan_images(tree, **wanted), folder, 1, interrupt)
    assert f"Make it with ptfast pack {tree} {folder}" in str(refused(folder))
    # As after a kill, bytes that nothing knows of.
    with (folder / "train.bin").open("ab") as file:
        file.write(b"half a piece")
    counts: list[int] = []
    make(plan_images(tree, **wanted), folder, 1, counts.append)
    assert counts == [0, 2, 4, 6, 8, 10, 12, 14]
    assert files_of(folder) == files_of(tmp_path / "whole")


@pytest.mark.slow
def test_a_killed_pack_is_made_whole(tmp_path: Path):
    for i in range(4000):
        write(tmp_path / "images" / "ab"[i % 2] / f"{i}.png", i, 32, 32)
    words = [sys.executable, "-m", "ptfast", "pack", str(tmp_path / "images"), "--workers", "2"]
    code = "import ptfast.data.packs.pack_sources as p, sys; p._MOST_IMAGES = 50; "
    words[1:3] = ["-c", code + "from ptfast.cli.command_line import run; sys.exit(run(sys.argv[1:]))"]
    started = {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    subprocess.run([*words, str(tmp_path / "whole")], check=True, **started)
    for delay_s in (0.2, 0.5):
        process = subprocess.Popen([*words, str(tmp_path / "pack")], **started)
        while not (tmp_path / "pack" / pack_reader.UNFINISHED).exists():
            time.sleep(0.01)
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (tmp_path / "pack" / pack_reader.MANIFEST).exists()
    subprocess.run([*words, str(tmp_path / "pack")], check=True, **started)
    assert files_of(tmp_path / "pack") == files_of(tmp_path / "whole")


def test_damage_is_seen_when_it_is_opened(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole, folder = tmp_path / "whole", tmp_path / "pack"
    pack(tree, whole)

    def damaged(name: str, content: bytes | None) -> str:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)
        error = refused(folder)
        assert name in str(error) or "format" in str(error)
        return str(error)

    files = files_of(whole)
    flipped = {
        name: content[:100] + bytes([content[100] ^ 1]) + content[101:] for name, content in files.items()
    }
    assert "checksum" in damaged("train.index", flipped["train.index"])
    assert "checksum" in damaged("test.bin", flipped["test.bin"])
    assert f"ptfast pack {tree} {folder}" in damaged("train.bin", files["train.bin"][:-1])
    assert "missing" in damaged("test.index", None)
    manifest = files["manifest.json"]
    assert "is damaged" in damaged("manifest.json", manifest[: len(manifest) // 2])
    assert "format 7" in damaged("manifest.json", manifest.replace(b'"ptfast_pack": 3', b'"ptfast_pack": 7'))
    # Too large to be read whenever it is opened: the command reads all of it.
    monkeypatch.setattr(pack_reader, "CHECKED_BYTES", 0)
    shutil.rmtree(folder)
    shutil.copytree(whole, folder)
    (folder / "train.bin").write_bytes(flipped["train.bin"])
    load(folder)
    assert run(["pack", "--verify", str(folder)]) == DataError.exit_code
    assert run(["pack", "--verify", str(whole)]) == 0


@pytest.mark.parametrize("many", [False, True])
def test_a_changed_source_is_seen(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: bool):
    if many:
        monkeypatch.setattr(pack_reader, "STAT_LIMIT", 0)
    folder = tmp_path / "pack"
    pack(tree, folder)
    added = tree / "train" / "cat" / "new.png"
    before = added.parent.stat()
    write(added, 99)
    message = str(refused(folder))
    assert "train/cat (5 files, now 6)" in message
    assert f"data.root={tree}" in message
    added.unlink()
    load(folder)  # the folder was written to, and contains what it held
    os.utime(added.parent, ns=(before.st_atime_ns, before.st_mtime_ns))
    path = tree / "test" / "dog" / "1.jpg"
    write(path, 98)
    os.utime(path, ns=(time.time_ns(), time.time_ns() + 10**9))
    if many:
        load(folder)  # of so many files only the folders are looked at
        assert run(["pack", "--verify", str(folder)]) == DataError.exit_code
    else:
        assert "newer" in str(refused(folder))
    pack(tree, folder)
    load(folder)
    shutil.rmtree(tree)
    load(folder)  # a pack serves without its source
