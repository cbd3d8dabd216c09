"""Hidden copies and files of systems are left out of folders and shards, and counted."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from running import train

from ptfast.cli.command_line import run
from ptfast.core.durations import Duration
from ptfast.data.decoding.image_decoding import is_hidden
from ptfast.data.sources.imagefolder import ImageFolder
from ptfast.data.sources.mask_folder import MaskFolder
from ptfast.data.sources.webdataset_shards import WebDataset

NO_VAL = Duration(0, "percent")
HIDDEN = (
    ".DS_Store",
    "Thumbs.db",
    "desktop.ini",
    "._0.png",
    ".ipynb_checkpoints/0-checkpoint.png",
    "__MACOSX/._0.png",
    "@eaDir/0.png",
)


def png(shade: int, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (8, 8), shade).save(file, "PNG")
    return file.getvalue()


def hide(folder: Path, content: bytes) -> None:
    for name in HIDDEN:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two classes of six images; hidden files lie beside the classes and in one of them."""
    root = tmp_path / "images"
    for name, shade in (("cat", 40), ("dog", 200)):
        (root / name).mkdir(parents=True)
        for number in range(6):
            (root / name / f"{number}.png").write_bytes(png(shade + number))
    hide(root, png(0))
    hide(root / "cat", png(0))
    return root


def test_names_that_count_as_hidden():
    assert all(map(is_hidden, HIDDEN))
    assert all(map(is_hidden, ("a/.git/b.png", "__macosx/a.png", "THUMBS.DB", "..data/a.png")))
    assert not any(map(is_hidden, ("./a.png", "../a/b.png", "a.b/c.png", "_a.png", "macosx/a.png", "/a.png")))


def test_folders_of_classes(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    splits = ImageFolder(str(tree)).load(val=NO_VAL, seed=0)
    assert splits.info.class_names == ("cat", "dog")
    assert len(splits.train) == 12
    assert splits.note == f"left out 14 hidden or system files, such as {tree}/.DS_Store"

    assert run(["pack", str(tree), str(tmp_path / "pack")]) == 0
    said = capsys.readouterr().out
    assert "left out 14 hidden or system files" in said
    assert "packed 12 images" in said
    # A copy that a notebook makes later does not make the pack old.
    (tree / "dog" / ".ipynb_checkpoints").mkdir()
    assert len(ImageFolder(str(tmp_path / "pack")).load(val=NO_VAL, seed=0).train) == 12

    words = ("model=mlp", "model.hidden=[8]", "batch_size=6", "epochs=1", "logger=none", "data=imagefolder")
    assert train(*words, f"data.root={tree}", "data.val=0", f"run.dir={tmp_path / 'run'}") == 0
    capsys.readouterr()
    assert run(["predict", str(tmp_path / "run"), str(tree)]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 12
    assert f"ptfast: left out 15 hidden or system files, such as {tree}/.DS_Store\n" in captured.err
    # What is named by the user is read.
    assert run(["predict", str(tmp_path / "run"), str(tree / "cat" / "._0.png")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_masks(tmp_path: Path):
    for part, mode in (("images", "RGB"), ("masks", "L")):
        hide(tmp_path / part, png(0))
        for number in range(4):
            (tmp_path / part / f"{number}.png").write_bytes(png(number % 2, mode))
    splits = MaskFolder(str(tmp_path)).load(val=NO_VAL, seed=0)
    assert len(splits.train) == 4
    assert splits.note == f"left out 14 hidden or system files, such as {tmp_path}/images/.DS_Store"


def test_shards_as_macos_makes_them(tmp_path: Path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(10):
            files = {
                f"./._{number}.png": b"fork",
                f"./{number}.png": png(number),
                f"./{number}.cls": b"%d" % (number % 2),
                f"__MACOSX/._{number}.cls": b"fork",
            }
            for name, content in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    (tmp_path / "._a.tar").write_bytes(b"fork")
    for pattern in (tmp_path, f"{tmp_path}/*.tar"):
        for _ in range(2):  # The second time, the shard's index comes from the cache.
            splits = WebDataset(str(pattern)).load(val=NO_VAL, seed=0)
            assert len(splits.train) == 10
            assert splits.note == "in 1 shard; left out 21 hidden or system files"
    images, labels = splits.train.fetch(np.arange(10))
    assert images[:, 0, 0, 0].tolist() == list(range(10))
    assert labels.tolist() == [0, 1] * 5
