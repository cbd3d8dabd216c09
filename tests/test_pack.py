"""Packs of images: what is in them is what was in the folder, and what is not whole is never taken for it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from running import same_bits, train, weights

from ptfast.cli import run
from ptfast.config.rules import PACK_FILES
from ptfast.data import build_data, packed
from ptfast.data.crops import draw_boxes
from ptfast.data.imagefolder import ImageFiles, ImageFolder
from ptfast.data.images import Decoder
from ptfast.data.pack import make
from ptfast.data.pack_images import plan_images, shrink
from ptfast.data.packed_images import PackedImages
from ptfast.data.source import SubsetSource, into_memory
from ptfast.display.counter import Counter
from ptfast.durations import Duration
from ptfast.errors import ConfigError, DataError, MachineError, PtfastError

NO_VAL = Duration(0, "percent")
HALF = Duration(50, "percent")


def write(path: Path, seed: int, height: int = 12, width: int = 12, mode: str = "RGB") -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert(mode).save(path)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """`train/` and `test/` of two classes, all of one size."""
    root, seed = tmp_path / "images", 0
    for split, count in (("train", 5), ("test", 2)):
        for name in ("cat", "dog"):
            for i in range(count):
                write(root / split / name / f"{i}.{'jpg' if i else 'png'}", seed := seed + 1)
    return root


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Class folders of images of several sizes and modes."""
    root = tmp_path / "mixed"
    for i, (height, width) in enumerate([(20, 30), (31, 17), (12, 12), (9, 40), (25, 25), (40, 22)]):
        write(root / "ab"[i % 2] / f"{i}.jpg", i, height, width)
    write(root / "a" / "grey.png", 7, 14, 15, "L")
    write(root / "b" / "alpha.png", 8, 16, 13, "RGBA")
    write(root / "b" / "ink.jpg", 9, 16, 13, "CMYK")
    return root


def pack(root: Path, folder: Path, workers: int = 1, **options: Any) -> packed.Manifest:
    wanted = {"size": None, "jpeg": False, "skip_corrupt": False, **options}
    return make(plan_images(root, **wanted), folder, workers)


def load(root: Path, val: Duration = NO_VAL, **kwargs: Any) -> Any:
    return build_data(ImageFolder(str(root), **kwargs), val=val, seed=0, task="auto")


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(folder: Path) -> DataError:
    with pytest.raises(DataError) as caught:
        load(folder)
    assert caught.value.code == "D007"
    assert caught.value.suggestion
    return caught.value


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
    assert packed.read_manifest(tmp_path / "pack") == manifest
    assert manifest.splits["train"].shape == [12, 12, 3]
    assert manifest.source.files == 14
    assert manifest.statistics == load(tree).info.extra["normalize"]
    assert sorted(files_of(tmp_path / "pack")) == [
        *("manifest.json", "test.bin", "test.index", "train.bin", "train.index")
    ]


def test_processes_write_what_one_writes(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pack(tree, tmp_path / "one")
    monkeypatch.setattr("ptfast.data.pack_images.PIECE_BYTES", 12 * 12 * 3)
    pack(tree, tmp_path / "many", workers=2)
    one, many = files_of(tmp_path / "one"), files_of(tmp_path / "many")
    assert all(many[name] == one[name] for name in one if name != "manifest.json")
    assert len(json.loads(many["manifest.json"])["splits"]["train"]["parts"]) == 10
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
    files = ImageFiles(paths, torch.zeros(9, dtype=torch.long), Decoder())
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
    originals = [Decoder()(str(path)).pixels for path in paths]
    for index, original in enumerate(originals):
        short = min(original.shape[:2])
        stored = source.image(index)
        assert min(stored.shape[:2]) == min(short, 15)
        assert np.array_equal(stored, shrink(original, 15))
    heights, widths = source.sizes(np.arange(9))
    assert [*zip(heights, widths, strict=True)] == [image.shape[:2] for image in originals]
    assert "packed as pixels at 15" in load(tmp_path / "pack", image_size=9).note


def test_what_reaches_a_worker_is_no_copy_of_the_data(tree: Path, tmp_path: Path):
    import pickle

    pack(tree, tmp_path / "pack")
    source = load(tmp_path / "pack").train
    before = source.fetch(np.arange(10))
    sent = pickle.dumps(source)
    assert (tmp_path / "pack" / "train.bin").read_bytes() not in sent
    assert same(pickle.loads(sent).fetch(np.arange(10)), before)
    assert same(into_memory(source).fetch(np.arange(10)), before)
    assert SubsetSource(source, np.arange(3)).packed


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


@pytest.mark.parametrize("torn", [False, True])
def test_it_goes_on_where_it_was_interrupted(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bool
):
    monkeypatch.setattr("ptfast.data.pack_images.PIECE_BYTES", 2 * 12 * 12 * 3)
    pack(tree, tmp_path / "whole")
    wanted = {"size": None, "jpeg": False, "skip_corrupt": False}
    folder = tmp_path / "pack"

    def interrupt(samples: int) -> None:
        if samples >= 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(plan_images(tree, **wanted), folder, 1, interrupt)
    assert f"Finish it with ptfast pack {tree} {folder}" in str(refused(folder))
    if torn:
        # A kill in the middle of a piece, and bytes that never reached the disk.
        with (folder / "train.bin").open("r+b") as file:
            file.seek(3 * 12 * 12 * 3)
            file.write(b"\0" * 100)
            file.seek(0, 2)
            file.write(b"half a piece")
        with (folder / packed.JOURNAL).open("a") as file:
            file.write('{"split": "tra')
    counts: list[int] = []
    make(plan_images(tree, **wanted), folder, 1, counts.append)
    assert counts[0] == (2 if torn else 6)
    assert files_of(folder) == files_of(tmp_path / "whole")


@pytest.mark.slow
def test_a_killed_pack_is_made_whole(tmp_path: Path):
    for i in range(4000):
        write(tmp_path / "images" / "ab"[i % 2] / f"{i}.png", i, 32, 32)
    words = [sys.executable, "-m", "ptfast", "pack", str(tmp_path / "images"), "--workers", "2"]
    code = "import ptfast.data.pack_images as p, sys; p._MOST_IMAGES = 50; from ptfast.cli import run; "
    words[1:3] = ["-c", code + "sys.exit(run(sys.argv[1:]))"]
    started = {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    subprocess.run([*words, str(tmp_path / "whole")], check=True, **started)
    for delay_s in (0.2, 0.5):
        process = subprocess.Popen([*words, str(tmp_path / "pack")], **started)
        while not (tmp_path / "pack" / packed.JOURNAL).exists():
            time.sleep(0.01)
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (tmp_path / "pack" / packed.MANIFEST).exists()
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
    assert "format 7" in damaged("manifest.json", manifest.replace(b'"ptfast_pack": 1', b'"ptfast_pack": 7'))
    # Too large to be read whenever it is opened: the command reads all of it.
    monkeypatch.setattr(packed, "CHECKED_BYTES", 0)
    shutil.rmtree(folder)
    shutil.copytree(whole, folder)
    (folder / "train.bin").write_bytes(flipped["train.bin"])
    load(folder)
    assert run(["pack", "--verify", str(folder)]) == DataError.exit_code
    assert run(["pack", "--verify", str(whole)]) == 0


@pytest.mark.parametrize("many", [False, True])
def test_a_changed_source_is_seen(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: bool):
    if many:
        monkeypatch.setattr(packed, "STAT_LIMIT", 0)
    folder = tmp_path / "pack"
    pack(tree, folder)
    added = tree / "train" / "cat" / "new.png"
    before = added.parent.stat()
    write(added, 99)
    message = str(refused(folder))
    assert "15 files instead of 14" in message
    assert f"data.root={tree}" in message
    added.unlink()
    load(folder)  # the folder was written to, and holds what it held
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


def test_the_command(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "pack"
    (tree / "train" / "cat" / "2.jpg").write_bytes(b"")
    line = ["pack", str(tree), str(folder), "--size", "8", "--workers", "1", "--on-corrupt", "skip"]
    assert run(line) == 0
    out = capsys.readouterr().out
    assert "packing 100%  14/14 images" in out
    assert "packed 13 images" in out
    assert f"skipped {tree / 'train' / 'cat' / '2.jpg'}: is empty (0 bytes)" in out
    assert f"ptfast train data=imagefolder data.root={folder}" in out
    assert load(folder).info.input_shape == (3, 8, 8)
    before = files_of(folder)
    assert run(line) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert files_of(folder) == before
    assert run([*line[:3], "--size", "6", "--workers", "1", "--on-corrupt=skip"]) == 0
    assert "made anew" in capsys.readouterr().out
    assert load(folder).info.input_shape == (3, 6, 6)
    assert run(["pack", "--verify", str(folder)]) == 0
    assert "is whole" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("pack images", "C016", "takes a source and a folder"),
        ("pack nowhere dst", "D001", "no such file or folder"),
        ("pack images dst --size 0", "C005", "Give pixels"),
        ("pack images dst --size big", "C005", "or keep"),
        ("pack images dst --workers none", "C005", "number of processes"),
        ("pack images dst --on-corrupt ignore", "C005", "Use error or skip"),
        ("pack images dst --jpeg --size 8", "C011", "keeps files as they are"),
        ("pack images images/dst", "C011", "within its source"),
        ("pack images full", "C011", "not empty and holds no pack"),
        ("pack images file", "C011", "is a file"),
        ("pack images of-another", "C011", "holds a pack of"),
        ("pack images unfinished", "C011", "holds an unfinished pack of"),
        ("pack images file/inside", "E001", "cannot be written: Not a directory"),
        ("pack --verify images", "D001", "holds no pack"),
        ("pack --verify images --jpeg", "C011", "takes nothing else"),
    ],
)
def test_what_makes_no_sense_is_refused(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: str, code: str, says: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "manifest.json").write_text('{"name": "of something else"}')
    (tmp_path / "file").write_text("")
    if "of-another" in words:
        pack(tree / "test", tmp_path / "of-another")
    if "unfinished" in words:
        (tmp_path / "unfinished").mkdir()
        (tmp_path / "unfinished" / packed.JOURNAL).write_text('{"source": {"path": "/else"}}\n')
    assert run(words.split()) != 0
    error = capsys.readouterr().err
    assert f"error[{code}]" in error
    assert says in error
    assert error.count("\n") == 1
    assert (tmp_path / "full" / "manifest.json").exists()


def test_what_the_machine_lacks_is_said(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda _: usage._replace(free=100))
        with pytest.raises(MachineError, match=r"needs about 5.9 KiB, and 100 B are free") as caught:
            pack(tree, tmp_path / "pack")
        assert caught.value.code == "E002"

    def fill(seen: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    wanted = {"size": None, "jpeg": False, "skip_corrupt": False}
    with pytest.raises(MachineError, match="no space is left") as caught:
        make(plan_images(tree, **wanted), tmp_path / "pack", 1, fill)
    assert caught.value.code == "E002"
    # Another process writes it.
    code = f"import fcntl; f = open({str(tmp_path / 'pack' / packed.JOURNAL)!r}, 'a'); fcntl.flock(f, 2); "
    code += "print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(MachineError, match="being written by another process"):
            pack(tree, tmp_path / "pack")
        process.communicate("\n")


def die(job: Any) -> Any:
    os._exit(9)


def test_a_process_that_dies_is_told(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ptfast.data.pack_images.PIECE_BYTES", 1)
    plan = plan_images(tree, size=None, jpeg=False, skip_corrupt=False)
    with pytest.raises(DataError, match="a process that was converting died") as caught:
        make(replace(plan, convert=die), tmp_path / "pack", 2)
    assert caught.value.code == "D008"
    assert "unfinished" in str(refused(tmp_path / "pack"))


def test_a_pack_of_something_else_says_what_reads_it(tree: Path, tmp_path: Path):
    pack(tree, tmp_path / "pack")
    path = tmp_path / "pack" / packed.MANIFEST
    path.write_text(path.read_text().replace('"kind": "pixels"', '"kind": "tokens"'))
    shutil.rmtree(tree)
    with pytest.raises(PtfastError, match="data=text_file"):
        load(tmp_path / "pack")


class Terminal:
    """A stream that keeps what is written to it."""

    encoding = "utf-8"

    def __init__(self, is_terminal: bool) -> None:
        self.text, self._is_terminal = "", is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_counter_tells_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch, is_terminal: bool):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream, clock = Terminal(is_terminal), [0.0]
    counter = Counter("packing", "images", 1000, stream, lambda: clock[0])  # pyright: ignore[reportArgumentType]
    for second in range(11):
        clock[0] = float(second)
        counter.show(200 + 80 * second)
    counter.close()
    lines = stream.text.replace("\r", "\n").strip().splitlines()
    assert "36%  360/1,000 images  80 images/s  eta 0:08" in lines[2]
    assert "100%  1,000/1,000 images" in stream.text
    assert ("\x1b[K" in stream.text) == ("━" in stream.text) == is_terminal


RUN = ("data=imagefolder", "data.val=0", "model=mlp", "model.hidden=[8]", "batch_size=4", "epochs=2")


def trained_on(folder: Path, root: Path, *words: str) -> dict[str, torch.Tensor]:
    assert train(*RUN, f"data.root={root}", *words, f"run.dir={folder}") == 0
    return weights(folder)


def test_training_from_a_pack_is_training_from_the_folder(tree: Path, tmp_path: Path):
    pack(tree, tmp_path / "pack")
    augment = ("augment=crop_flip", "augment.crop_padding=2")
    expected = trained_on(tmp_path / "files", tree, "dataloader=plain", *augment)
    workers = [f"workers dataloader.workers={number}" for number in (0, 1, 2)]
    for kind in ("packed", "plain", "memory", "auto", *workers):
        words = f"dataloader={kind}".split()
        found = trained_on(tmp_path / kind, tmp_path / "pack", *words, *augment)
        assert same_bits(found, expected), kind
    resolved = json.loads((tmp_path / "auto" / "resolved.json").read_text())
    assert resolved["dataloader"] == "packed"
    cropped = ("augment=resized_crop", "data.image_size=8", "dataloader=plain")
    jpeg = tmp_path / "jpeg"
    pack(tree, jpeg, jpeg=True)
    expected = trained_on(tmp_path / "cropped", tree, *cropped)
    for root in (jpeg, tmp_path / "pack"):
        assert same_bits(trained_on(tmp_path / f"from-{root.name}", root, *cropped), expected)
        by_workers = (*cropped[:-1], "dataloader=workers", "dataloader.workers=2")
        assert same_bits(trained_on(tmp_path / f"workers-{root.name}", root, *by_workers), expected)


def test_a_folder_is_evaluated_by_what_has_trained_from_its_pack(tree: Path, tmp_path: Path, capsys: Any):
    pack(tree, tmp_path / "pack")
    trained_on(tmp_path / "run", tmp_path / "pack", "dataloader=packed")

    def evaluated(*words: str) -> str:
        capsys.readouterr()
        assert run(["eval", str(tmp_path / "run"), *words]) == 0
        return capsys.readouterr().out

    assert evaluated(f"data.root={tree}") == evaluated()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("data=digits", "only image folders and text files are packed"),
        (
            "data=imagefolder data.root=images",
            "Make one with ptfast pack images images-packed and use data.root=",
        ),
        ("data=text_file data.path=file model=gpt", "Make one with ptfast pack file file-packed"),
    ],
)
def test_what_is_no_pack_is_not_read_as_one(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: str, says: str
):
    assert {packed.MANIFEST, packed.JOURNAL} == set(PACK_FILES)
    monkeypatch.chdir(tree.parent)
    (tree.parent / "file").write_text("a text")
    assert run(["train", *words.split(), "dataloader=packed"]) == ConfigError.exit_code
    error = capsys.readouterr().err
    assert "error[C011]: dataloader.kind=packed" in error
    assert says in error


def test_files_that_moved_are_noticed(tree: Path, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "pack"
    pack(tree, folder)
    (tree / "train" / "cat" / "1.jpg").rename(tree / "train" / "dog" / "moved.jpg")
    assert run(["pack", "--verify", str(folder)]) == DataError.exit_code
    assert "moved, renamed or replaced" in capsys.readouterr().err


def test_the_remedy_makes_the_same_pack(tree: Path, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "pack"
    pack(tree, folder, size=6)
    with (folder / "train.bin").open("ab") as file:
        file.write(b"x")
    assert run(["pack", "--verify", str(folder)]) == DataError.exit_code
    assert f"{folder} --size 6" in capsys.readouterr().err


def test_what_was_skipped_is_not_passed_over(tree: Path, tmp_path: Path, capsys: Any) -> None:
    (tree / "train" / "cat" / "bad.png").write_bytes(b"no image")
    words = ["pack", str(tree), str(tmp_path / "pack")]
    assert run([*words, "--on-corrupt", "skip"]) == 0
    assert run(words) == DataError.exit_code
    assert "was left out of the pack" in capsys.readouterr().err
    assert run([*words, "--on-corrupt", "skip"]) == 0


@pytest.mark.parametrize(
    ("name", "says"), [("nothing", "no such file or folder"), ("pack", "is a pack already")]
)
def test_sources_that_are_none(name: str, says: str, tree: Path, tmp_path: Path, capsys: Any) -> None:
    pack(tree, tmp_path / "pack")
    assert run(["pack", str(tmp_path / name), str(tmp_path / "other")]) == DataError.exit_code
    assert f"SRC={tmp_path / name}: {says}" in capsys.readouterr().err
