"""Runs over folders with files that cannot be read: skipped alike by every loader, and said."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from running import same_bits, summary, train, weights

from ptfast.cli.command_line import run

WORDS = ("model=mlp", "model.hidden=[8]", "batch_size=6", "epochs=2", "data=imagefolder", "logger=none")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two classes in `train/` and `val/`, of which three files are damaged, one in another way each."""
    generator = np.random.default_rng(0)
    root = tmp_path / "images"
    for split, count in (("train", 20), ("val", 8)):
        for i in range(count):
            path = root / split / f"class_{i % 2}" / f"{i:02}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(path)
    (root / "train/class_0/04.jpg").write_bytes(b"")
    path = root / "train/class_1/07.jpg"
    path.write_bytes(path.read_bytes()[:300])
    (root / "val/class_1/01.jpg").write_text("this is no image")
    return root


def test_every_loader_skips_the_same_files_and_says_which(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folders = {kind: tmp_path / kind for kind in ("plain", "workers", "memory")}
    for kind, folder in folders.items():
        words = (*WORDS, f"data.root={tree}", "data.on_corrupt=skip", f"dataloader={kind}")
        assert train(*words, "dataloader.workers=2", f"run.dir={folder}") == 0
        captured = capsys.readouterr()
        text = " ".join((captured.out + captured.err).split())
        assert "corrupt files skipped" in text
        assert "skipped 3 files that cannot be read: " in text
        skipped = summary(folder)["skipped_files"]
        assert skipped["count"] == 3
        assert [Path(name).name for name in skipped["first"]] == ["04.jpg", "07.jpg", "01.jpg"]
        # Seven of the eight files count.
        right = 7 * summary(folder)["val"]["accuracy"]
        assert right == pytest.approx(round(right))
        assert same_bits(weights(folder), weights(folders["plain"]))


def test_a_file_that_cannot_be_read_is_named_with_the_remedy_and_skipped_in_prediction(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = (*WORDS, f"data.root={tree}", f"run.dir={tmp_path / 'run'}")
    for loader in ("plain", "memory"):
        assert train(*words, f"dataloader={loader}") == 3
        err = capsys.readouterr().err
        assert "04.jpg: is empty (0 bytes). Replace the file, remove it, or leave" in err
        assert err.endswith("or leave such files out with data.on_corrupt=skip.\n")
    # None of these is a file that ends.
    os.mkfifo(tree / "train/class_0/pipe.jpg")
    (tree / "train/class_0/zero.jpg").symlink_to("/dev/zero")
    (tree / "train/class_0/itself.jpg").symlink_to("itself.jpg")
    (tree / "train/class_0/back").symlink_to(tree)
    assert train(*words, "data.on_corrupt=skip") == 0
    first = tree / "train/class_0/back"
    said = f"20 train, 8 val; passed over {first} and 3 more: no files"
    assert said in " ".join(capsys.readouterr().out.split())
    assert run(["predict", str(tmp_path / "run"), str(tree / "train")]) == 0
    captured = capsys.readouterr()
    assert (len(captured.out.splitlines()), len(captured.err.splitlines())) == (18, 4)
    assert "ptfast: warning: " in captured.err
    assert f"ptfast: passed over {first} and 3 more: no files\n" in captured.err
    assert "04.jpg: is empty (0 bytes). Replace the file, or remove it" in captured.err
    assert run(["predict", str(tmp_path / "run"), str(tree / "train/class_0/04.jpg")]) == 3
    assert "error[D005]: " in capsys.readouterr().err


def test_where_nothing_is_skipped_loaders_agree_too(tree: Path, tmp_path: Path):
    for path in tree.rglob("*.jpg"):
        if path.stat().st_size < 400:
            path.write_bytes((tree / "train/class_0/00.jpg").read_bytes())
    folders = [tmp_path / kind for kind in ("plain", "memory")]
    for folder in folders:
        words = (*WORDS, f"data.root={tree}", "data.on_corrupt=skip", f"dataloader={folder.name}")
        assert train(*words, f"run.dir={folder}") == 0
        assert "skipped_files" not in summary(folder)
    assert same_bits(*(weights(folder) for folder in folders))
