"""`ptfast eval RUN` on other data: all of it if it has no splits; of the training data what was held out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from running import train
from stand_ins import SEGMENTER

from ptfast.cli.command_line import run

TINY = ("model=mlp", "model.hidden=[8]", "epochs=4", "batch_size=10", "logger=none", "run.dir=r")
Evaluated = tuple[list[str], str]


def images(folder: str, count: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for name, shade in (("dark", 40), ("light", 200)):
        Path(folder, name).mkdir(parents=True)
        for number in range(count // 2):
            pixels = rng.integers(shade - 30, shade + 30, (8, 8, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(f"{folder}/{name}/{number}.png")


def arrays(file: str, count: int, prefix: str = "", seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    x = (rng.normal(size=(count, 4)) + 4 * labels[:, None]).astype(np.float32)
    np.savez(file, **{f"{prefix}x": x, f"{prefix}y": labels})


@pytest.fixture
def evaluated(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Evaluated]:
    """The splits that `eval r` measures, and what it says of the data."""

    def evaluate(*words: str) -> Evaluated:
        capsys.readouterr()
        assert run(["eval", "r", *words]) == 0
        captured = capsys.readouterr()
        said = [line for line in captured.err.splitlines() if line.startswith("ptfast: data: ")]
        splits = [json.loads(line)["split"] for line in captured.out.splitlines()]
        return splits, said[0].removeprefix("ptfast: data: ").partition(";")[0] if said else ""

    return evaluate


def test_images(evaluated: Callable[..., Evaluated]) -> None:
    images("all", 40)
    images("new", 32, seed=1)
    assert train(*TINY, "data=imagefolder", "data.root=all") == 0
    assert evaluated() == (["val"], "")
    assert evaluated("data.root=new") == (["val"], "imagefolder: 32 val")
    # The user asks for a part; and of the data of training only the held-out part was not trained on.
    assert evaluated("data.root=new", "data.val=25%") == (["val"], "imagefolder: 8 val, held out of 32")
    assert evaluated("data.root=new", "data.val=0") == (["val"], "imagefolder: 32 val")
    assert evaluated("data.on_corrupt=skip") == (["val"], "imagefolder: 4 val, held out of 40")
    shutil.copytree("all", "copy")
    assert evaluated("data.root=copy") == (["val"], "imagefolder: 4 val, held out of 40")
    for source in ("all", "new"):
        assert run(["pack", source, f"{source}-pack"]) == 0
    assert evaluated("data.root=new-pack") == (["val"], "imagefolder: 32 val")
    assert evaluated("data.root=all-pack") == (["val"], "imagefolder: 4 val, held out of 40")
    # Folders of held-out samples need no train/.
    for split in ("val", "test"):
        shutil.copytree("new", f"split/{split}")
    assert evaluated("data.root=split") == (["val", "test"], "imagefolder: 32 val, 32 test")
    shutil.rmtree("split/val")
    assert evaluated("data.root=split") == (["test"], "imagefolder: 32 test")
    assert train(*TINY[:-1], "data=imagefolder", "data.root=split", "run.dir=s") == 3


def test_all_samples_count_once(
    evaluated: Callable[..., Evaluated], capsys: pytest.CaptureFixture[str]
) -> None:
    images("all", 40)
    images("new", 10, seed=1)
    assert train(*TINY, "data=imagefolder", "data.root=all") == 0
    capsys.readouterr()
    shutil.move("new/dark/0.png", "new/light/wrong.png")
    assert run(["eval", "r", "data.root=new"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == 0.9


def test_arrays(evaluated: Callable[..., Evaluated]) -> None:
    arrays("all.npz", 60)
    arrays("new.npz", 30, seed=1)
    arrays("test.npz", 20, "test_", seed=1)
    assert train(*TINY, "data=arrays", "data.path=all.npz") == 0
    assert evaluated("data.path=new.npz") == (["val"], "arrays: 30 val")
    assert evaluated("data.path=test.npz") == (["test"], "arrays: 20 test")
    assert evaluated("data.path=all.npz") == (["val"], "arrays: 6 val, held out of 60")


def texts(file: str, count: int) -> None:
    rows = [f"{'good' if i % 2 else 'bad'} film {i},{'yes' if i % 2 else 'no'}" for i in range(count)]
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text("\n".join(["text,label", *rows]) + "\n")


def test_labelled_texts(evaluated: Callable[..., Evaluated]) -> None:
    texts("all.csv", 40)
    texts("new.csv", 14)
    texts("folder/dev.csv", 12)
    words = (
        "data=text_tsv",
        "model=text_encoder",
        "model.width=8",
        "model.depth=1",
        "epochs=1",
        "batch_size=8",
    )
    assert train(*words, "logger=none", "run.dir=r", "data.path=all.csv") == 0
    assert evaluated("data.path=new.csv") == (["val"], "text_tsv: 14 val")
    assert evaluated("data.path=all.csv") == (["val"], "text_tsv: 4 val, held out of 40")
    assert evaluated("data.path=null", "data.root=folder") == (["val"], "text_tsv: 12 val")


def test_running_text(evaluated: Callable[..., Evaluated]) -> None:
    Path("all.txt").write_text("to be or not to be " * 40)
    Path("new.txt").write_text("or not to be to be " * 17)
    words = ("data=text_file", "data.context_length=8", "model=gpt", "model.width=8", "model.depth=1")
    words = (*words, "model.heads=1", "steps=4", "epochs=null", "batch_size=8", "logger=none", "run.dir=r")
    assert train(*words, "data.path=all.txt") == 0
    assert evaluated("data.path=new.txt") == (["val"], "text_file: 40 val")
    assert evaluated("data.path=all.txt") == (["val"], "text_file: 9 val")


def test_tables_and_lists_of_images(evaluated: Callable[..., Evaluated]) -> None:
    def table(file: str, count: int) -> None:
        rows = [f"{i % 7},{i % 3},{'ab'[i % 2]}" for i in range(count)]
        Path(file).write_text("\n".join(["x,z,kind", *rows]) + "\n")

    table("all.csv", 50)
    table("new.csv", 21)
    assert train(*TINY, "data=table", "data.path=all.csv", "data.target=kind") == 0
    assert evaluated("data.path=new.csv") == (["val"], "table: 21 val")
    assert evaluated("data.path=all.csv") == (["val"], "table: 5 val")
    shutil.rmtree("r")
    images("files", 40)
    names = [f"files/{kind}/{i}.png,{kind}" for i in range(20) for kind in ("dark", "light")]
    Path("list.csv").write_text("\n".join(["image,label", *names]) + "\n")
    Path("few.csv").write_text("\n".join(["image,label", *names[:18]]) + "\n")
    assert train(*TINY, "data=image_list", "data.path=list.csv") == 0
    assert evaluated("data.path=few.csv") == (["val"], "image_list: 18 val")


def test_masks(evaluated: Callable[..., Evaluated]) -> None:
    def pairs(folder: str, count: int) -> None:
        for part, mode in (("images", "RGB"), ("masks", "L")):
            Path(folder, part).mkdir(parents=True)
            for number in range(count):
                Image.new(mode, (16, 16), number % 2).save(f"{folder}/{part}/{number}.png")

    pairs("all", 20)
    pairs("new", 11)
    pairs("split/val", 7)
    words = ("data=mask_folder", *SEGMENTER, "steps=2", "epochs=null")
    assert train(*words, "logger=none", "run.dir=r", "data.root=all") == 0
    assert evaluated("data.root=new") == (["val"], "mask_folder: 11 val")
    assert evaluated("data.root=split") == (["val"], "mask_folder: 7 val")
