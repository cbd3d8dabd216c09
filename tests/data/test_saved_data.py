"""Data beside a saved model: read as the model knows it, and refused where it is not what it was."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from running import build_run, train
from torch.utils.data import Dataset, TensorDataset

from ptfast.cli import command_line
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, DataError, SavedStateError
from ptfast.core.protocols import DataInfo
from ptfast.data.build_data import build_data
from ptfast.data.data_fingerprint import describe_part
from ptfast.data.dataset import as_known, check_same_data, read_info
from ptfast.data.sources.arrays import Arrays
from ptfast.data.sources.imagefolder import ImageFolder
from ptfast.data.sources.text_dataset import TextFile, TextTsv

VAL = Duration(25, "percent")
INFO = DataInfo(
    "image",
    "classification",
    num_classes=2,
    class_names=("cat", "dog"),
    input_shape=(3, 8, 8),
    num_train=100,
    extra={"tokenizer": {"kind": "words", "entries": ["a", "b"]}},
)


def read(source: Any, **given: Any) -> Any:
    return build_data(source, val=VAL, seed=0, task="auto", **given)


def tsv(path: Path, lines: str) -> Path:
    path.write_text(lines.replace("|", "\n").replace("=", "\t"))
    return path


def test_facts_survive_being_saved() -> None:
    again = read_info(json.loads(json.dumps(asdict(INFO))))
    assert again == INFO
    check_same_data(again, INFO)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_classes": 3, "class_names": None}, "the number of classes (2, now 3), the classes"),
        ({"class_names": ("dog", "cat")}, "the classes (cat, dog, now dog, cat)"),
        ({"input_shape": (3, 9, 9)}, "the shape of the inputs (3x8x8, now 3x9x9)"),
        ({"num_train": 1101}, "the number of training samples (100, now 1,101)"),
        ({"extra": {}}, "the vocabulary"),
        ({"task": "regression"}, "what the labels are for"),
    ],
)
def test_data_that_has_changed_is_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(SavedStateError) as caught:
        check_same_data(INFO, replace(INFO, **change))
    assert caught.value.code == "S003"
    assert named in str(caught.value)


def test_states_that_do_not_say_how_many_samples_there_were_go_on() -> None:
    check_same_data(replace(INFO, num_train=None), INFO)


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        ({"class_names": ("cat", "fox")}, "D003", "has fox, which the model does not know and lacks dog"),
        ({"class_names": ("dog", "cat")}, "D003", "they are in another order"),
        ({"class_names": None, "num_classes": 3}, "D004", "has 3 classes; the model was trained on 2"),
        ({"input_shape": (3, 9, 9)}, "D005", "inputs of shape 3x9x9; the model was trained on 3x8x8"),
        ({"kind": "features"}, "D004", "is features data"),
    ],
)
def test_other_data_that_the_model_cannot_read_is_refused(
    change: dict[str, Any], code: str, named: str
) -> None:
    with pytest.raises(DataError) as caught:
        as_known(INFO, replace(INFO, **change))
    assert caught.value.code == code
    assert named in str(caught.value)


def test_texts_are_read_by_the_vocabulary_and_the_classes_of_training(tmp_path: Path) -> None:
    trained = read(TextTsv(path=str(tsv(tmp_path / "a", "red blue=x|blue red=y|red=z|blue=x|"))))
    other = TextTsv(path=str(tsv(tmp_path / "b", "blue green=z|red=y|blue=z|red=z|")))
    data = read(other, known=trained.info)
    assert data.info.extra["tokenizer"] == trained.info.extra["tokenizer"]
    assert data.info.class_names == ("x", "y", "z")
    rows = {
        tuple(source.fetch(np.array([i]))[0][0].tolist()) for source in (data.train, data.val) for i in [0]
    }
    entries = trained.info.extra["tokenizer"]["entries"]
    unknown, blue, red = 1, entries.index("blue"), entries.index("red")
    assert rows <= {(blue, unknown), (red,), (blue,)}
    labels = [int(label) for source in (data.train, data.val) for label in source.fetch(np.arange(1))[1]]
    assert set(labels) <= {1, 2}
    with pytest.raises(DataError, match="label w does not occur in training") as caught:
        read(TextTsv(path=str(tsv(tmp_path / "c", "red=w|blue=x|"))), known=trained.info)
    assert caught.value.code == "D004"


def test_running_text_is_read_by_the_vocabulary_of_training(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("abcd" * 20)
    (tmp_path / "b").write_text("dcb" * 20)
    (tmp_path / "c").write_text("xyz" * 20)
    trained = read(TextFile(str(tmp_path / "a"), context_length=4))
    data = read(TextFile(str(tmp_path / "b"), context_length=8), known=trained.info)
    (inputs, _) = data.val.fetch(np.array([0]))
    assert inputs.shape == (1, 4)
    assert set(inputs.flatten().tolist()) == {1, 2, 3}
    with pytest.raises(DataError, match="'x' does not occur in the training text"):
        read(TextFile(str(tmp_path / "c"), context_length=4), known=trained.info)


def test_arrays_are_normalized_as_in_training(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(40) % 4)
    np.savez(tmp_path / "b.npz", x=5 * x + 7, y=np.arange(40) % 2)
    trained = read(Arrays(str(tmp_path / "a.npz")))
    data = read(Arrays(str(tmp_path / "b.npz")), known=trained.info)
    assert data.info.extra == trained.info.extra
    assert data.info.num_classes == 4
    np.savez(tmp_path / "c.npz", x=x, y=np.arange(40) % 5)
    with pytest.raises(DataError, match="has 5 classes; the model was trained on 4"):
        read(Arrays(str(tmp_path / "c.npz")), known=trained.info)


class Images(Dataset[Any]):
    """Images that are read one by one; how often is counted."""

    num_classes = 2
    reads = 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        type(self).reads += 1
        return torch.full((3, 4, 4), index, dtype=torch.uint8), index % 2


def test_statistics_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Images, "reads", 0)
    words = ("data=custom", "data._target_=test_saved_data.Images", "model.hidden=[4]", "steps=2")
    words = (*words, "batch_size=8", "dataloader=plain", f"run.dir={tmp_path / 'run'}")
    assert train(*words) == 0
    checkpoint_folder = (tmp_path / "run" / "saved" / "last").resolve()
    calls: list[int] = []
    monkeypatch.setattr("ptfast.data.build_data.statistics", lambda *given: calls.append(1))
    run = build_run(tmp_path / "run", *words, checkpoint_folder=checkpoint_folder)
    assert calls == []
    saved = json.loads((checkpoint_folder / "state.json").read_text())["info"]
    assert run.info.extra["normalize"] == saved["extra"]["normalize"]
    assert command_line.run(["eval", str(tmp_path / "run")]) == 0
    assert calls == []


def test_a_rank_takes_the_statistics_of_the_first() -> None:
    asked: list[int] = []
    given = {"mean": [1.0, 2.0, 3.0], "std": [1.0, 1.0, 1.0]}

    def once(compute: Any) -> Any:
        asked.append(1)
        return given

    data = read(Images(), once=once)
    # And what tells the data from other data.
    assert asked == [1, 1]
    assert data.info.extra["normalize"] == given


def figures_of(capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_evaluating_a_saved_run(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(3, size=60)
    x = (generator.normal(size=(60, 4)) + 3 * labels[:, None]).astype(np.float32)
    np.savez("a.npz", x=x, y=labels)
    # In this one class 2 does not occur, and the scale is another.
    few = labels < 2
    np.savez("b.npz", x=x[few], y=labels[few])
    words = ("data=arrays", "data.path=a.npz", "model.hidden=[16]", "epochs=20", "batch_size=15")
    assert train(*words, "optimizer.lr=0.01", "run.dir=run", "data.val=15samples") == 0
    capsys.readouterr()
    assert command_line.run(["eval", "run", "data.path=b.npz", "--checkpoint", "last"]) == 0
    # By statistics of its own the samples of `b` would lie elsewhere.
    assert figures_of(capsys)["accuracy"] > 0.9
    np.savez("a.npz", x=x[1:], y=labels[1:])
    assert command_line.run(["eval", "run"]) == 6
    assert "the number of training samples (45, now 44)" in capsys.readouterr().err


def test_resuming_with_other_data_is_refused(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tsv(Path("a.tsv"), "red blue=x|blue red=y|" * 20)
    words = ["train", "data=text_tsv", "data.path=a.tsv", "model=text_encoder", "model.width=8"]
    words += ["schedule=constant", "run.dir=run", "batch_size=8"]
    assert command_line.run([*words, "epochs=1"]) == 0
    tsv(Path("a.tsv"), "red blue=x|blue green=y|" * 20)
    assert command_line.run([*words, "epochs=2", "run.resume=auto"]) == 6
    assert "the vocabulary" in capsys.readouterr().err


def pictures(folder: Path, count: int, *, first: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(first, first + count):
        # One color takes as many bytes as another: what is compared are names and sizes.
        Image.new("RGB", (8, 8), (number % 7 * 30, 0, 0)).save(folder / f"{number:03d}.bmp")


def folder(at: Path) -> None:
    for split, name in (("train", "cat"), ("train", "dog"), ("val", "cat"), ("val", "dog")):
        pictures(at / split / name, 8)


def text(at: Path, second: str = "or") -> None:
    at.mkdir(parents=True, exist_ok=True)
    (at / "a.txt").write_text(f"to be {second} not to be, " + "to be or not to be, " * 40)


def arrays(at: Path, label: int = 0) -> None:
    at.mkdir(parents=True, exist_ok=True)
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    np.savez(at / "a.npz", x=x, y=np.where(np.arange(40) == 39, label, np.arange(40) % 2))


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b".")


IMAGES = (folder, lambda at: ImageFolder(str(at)))


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        (IMAGES, lambda at: pictures(at / "train/cat", 1, first=8), "train/cat (8 files, now 9)"),
        (
            IMAGES,
            lambda at: (at / "train/dog/003.bmp").rename(at / "train/dog/300.bmp"),
            "since the state was saved: train/dog (other files than before). Put it back",
        ),
        (IMAGES, lambda at: lengthen(at / "train/dog/003.bmp"), "train/dog (other files than before)"),
        (
            (text, lambda at: TextFile(str(at / "a.txt"), context_length=16)),
            lambda at: text(at, "ro"),
            "train (other tokens than before)",
        ),
        (
            (arrays, lambda at: Arrays(str(at / "a.npz"))),
            lambda at: arrays(at, 1),
            "train (other samples than before)",
        ),
    ],
)
def test_training_on_what_has_changed_is_refused(kind: Any, change: Any, said: str, tmp_path: Path) -> None:
    make, dataset = kind
    make(tmp_path / "here")
    before = read(dataset(tmp_path / "here")).info
    (tmp_path / "here").rename(tmp_path / "moved")
    # What lies elsewhere, or was copied there, is the same.
    os.utime(next(path for path in (tmp_path / "moved").rglob("*") if path.is_file()))
    assert check_same_data(before, read(dataset(tmp_path / "moved")).info) == ""
    change(tmp_path / "moved")
    after = read(dataset(tmp_path / "moved")).info
    with pytest.raises(SavedStateError) as caught:
        check_same_data(before, after)
    assert caught.value.code == "S003"
    assert said in str(caught.value)
    # Whoever evaluates is told.
    if after.num_train == before.num_train:
        assert check_same_data(before, after, trains=False) in str(caught.value)


def test_a_run_goes_on_where_its_data_was_moved_and_not_where_it_has_changed(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def go_on(root: str, steps: int, *words: str) -> int:
        capsys.readouterr()
        words = ("data=imagefolder", f"data.root={root}", "model.hidden=[4]", "batch_size=4", *words)
        return command_line.run(["train", *words, "schedule=constant", f"steps={steps}", "run.dir=run"])

    folder(Path("here"))
    assert go_on("here", 2) == 0
    Path("here").rename("moved")
    pictures(Path("moved/val/cat"), 1, first=8)
    assert go_on("moved", 3, "run.resume=auto") == 0
    said = capsys.readouterr()
    assert "step 2; other held-out data than before: val/cat (8 files, now 9)" in " ".join(said.out.split())
    pictures(Path("moved/train/cat"), 1, first=8)
    assert go_on("moved", 4, "run.resume=auto") == 6
    (line,) = capsys.readouterr().err.splitlines()
    assert "the number of training samples (16, now 17), train/cat (8 files, now 9). Put it back" in line
    Path("moved/train/cat/008.bmp").rename("moved/val/cat/009.bmp")
    assert command_line.run(["eval", "run"]) == 0
    line, _ = capsys.readouterr().err.splitlines()
    assert "warning: data: has changed since training, so samples held out" in line


class Labelled(Dataset[Any]):
    """Samples that are made when they are asked for, and a word on which they are."""

    num_classes = 2

    def __init__(self, fingerprint: str | None = None, flipped: bool = False) -> None:
        self.targets = [(i + flipped) % 2 for i in range(24)]
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), float(index)), self.targets[index]


def test_data_sets_of_the_user_are_told_apart_by_labels_and_what_they_say() -> None:
    first = read(Labelled()).info
    check_same_data(first, read(Labelled()).info)
    for other in (Labelled(flipped=True), Labelled("version 2")):
        with pytest.raises(SavedStateError, match=r"train \(other samples than before\)"):
            check_same_data(first, read(other).info)


def test_large_arrays_are_told_apart_by_some_of_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ptfast.data.data_fingerprint.FULL_BYTES", 4 * 2**20)
    array = np.arange(8 * 2**20, dtype=np.uint8)
    before = describe_part(1, "samples", array)
    assert describe_part(1, "samples", array.copy()) == before
    for place in (0, len(array) - 1):
        array[place] ^= 1
        assert describe_part(1, "samples", array) != before
        array[place] ^= 1


class Tokens(Dataset[Any]):
    def __init__(self, size: int, stated: bool = False) -> None:
        self.size = size
        if stated:
            self.vocab_size = 50

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        tokens = torch.tensor([0, 1, 2 if index != 5 else 30])
        return tokens, tokens + 1


def test_the_vocabulary_is_told_by_all_tokens_or_by_nobody(in_tmp: Path) -> None:
    inputs = torch.tensor([[0, 1], [2, 9]])
    assert read(TensorDataset(inputs, torch.tensor([0, 1]))).info.vocab_size == 10
    assert read(TensorDataset(inputs, inputs + 1)).info.vocab_size == 11
    assert read(Tokens(40)).info.vocab_size == 32
    assert read(Tokens(40, stated=True)).info.vocab_size == 50
    assert read(Tokens(3000)).info.vocab_size is None
    with pytest.raises(
        ConfigError, match=r"needs vocab_size.*Set model.vocab_size, give your dataset an attr"
    ):
        build_run(
            in_tmp / "run",
            "data=custom",
            "data._target_=test_saved_data.Tokens",
            "data.size=3000",
            "model=gpt",
        )
