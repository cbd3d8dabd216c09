"""Hugging Face datasets, through a stand-in for the package where only its interface matters."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, DataError, MachineError
from ptfast.data.build_data import build_data
from ptfast.data.sources.hf_dataset import HfDataset
from ptfast.data.sources.text_dataset import TextTsv

NO_VAL = Duration(0, "percent")


class Table:
    """Columns, as a split of `datasets` shows them."""

    def __init__(self, names: list[str] | None, **columns: list[Any]) -> None:
        self.columns, self.column_names = columns, list(columns)
        self.features = {name: SimpleNamespace(names=names if name == "label" else None) for name in columns}

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The dataset that the stand-in finds under the name `there`."""
    content: dict[str, Any] = {}
    module = ModuleType("datasets")

    def load_dataset(path: str, name: str | None = None, streaming: bool = False) -> Any:
        if path != "there":
            raise FileNotFoundError(f"Dataset '{path}' doesn't exist on the Hub")
        return content

    module.load_dataset = load_dataset  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return content


def load(**kwargs: Any) -> Any:
    return build_data(HfDataset("there", **kwargs), val=NO_VAL, seed=0, task="auto")


def test_text_with_named_classes_and_a_test_split_without_labels(hub: dict[str, Any]):
    hub["train"] = Table(["bad", "good"], sentence=["a b", "b", "c a a"], label=[0, 1, 1])
    hub["validation"] = Table(["bad", "good"], sentence=["b d"], label=[0])
    hub["test"] = Table(["bad", "good"], sentence=["b d"], label=[-1])
    data = load()
    assert data.note == "hf: 3 train, 1 val; test has no labels, so it is left out"
    assert (data.info.kind, data.info.class_names, data.info.vocab_size) == ("text", ("bad", "good"), 5)
    assert data.val.fetch(np.array([0]))[0].tolist() == [[3, 1]]


def images_on_disk(folder: Path, images: list[Any]) -> HfDataset:
    """A dataset with a column of images, PIL's or bytes of files, saved to `folder`."""
    datasets = pytest.importorskip("datasets")
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["x", "y"])}
    columns = {"image": images, "label": [i % 2 for i in range(len(images))]}
    datasets.Dataset.from_dict(columns, features=datasets.Features(kinds)).save_to_disk(str(folder))
    return HfDataset(str(folder))


def load_from(source: HfDataset) -> Any:
    return build_data(source, val=NO_VAL, seed=0, task="auto")


def test_images(tmp_path: Path):
    data = load_from(
        images_on_disk(tmp_path, [Image.fromarray(np.full((4, 6, 3), i, np.uint8)) for i in range(3)])
    )
    assert data.info.input_shape == (3, 4, 6)
    assert data.train.fetch(np.array([2]))[0].flatten().tolist() == [2] * 72


def test_images_of_16_bits_keep_their_upper_8(tmp_path: Path):
    deep = [
        (np.arange(64, dtype=np.uint16).reshape(8, 8) * 900 + place).astype(np.uint16) for place in (0, 99)
    ]
    data = load_from(images_on_disk(tmp_path, [Image.fromarray(each) for each in deep]))
    pixels = data.train.fetch(np.arange(2))[0].numpy()
    assert np.array_equal(pixels, np.repeat(np.stack(deep)[..., None] >> 8, 3, axis=3))


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ({"bytes": b"no image", "path": None}, "row 1 of train: is not an image that can be decoded"),
        (None, r"row 1 of train: is empty \(0 bytes\)"),
        (
            Image.fromarray(np.full((4, 4), 70_000, np.int32)),
            "row 1 of train: contains integers from 70000 to 70000",
        ),
    ],
)
def test_an_image_that_cannot_be_read_is_named_by_its_row(tmp_path: Path, image: Any, said: str):
    good = Image.fromarray(np.zeros((4, 4, 3), np.uint8))
    with pytest.raises(DataError, match=said):
        load_from(images_on_disk(tmp_path, [good, image, good]))


TEXTS = [f"word{row % 7} x{row % 3}" for row in range(30)]
LABELS = {
    "numbers": ([0, 1, 2] * 10, "classification", 3, None, [0, 1, 2]),
    "names": (["c", "a", "b"] * 10, "classification", 3, ("a", "b", "c"), [2, 0, 1]),
    "numbers as texts": (["10", "9", "8"] * 10, "classification", 3, ("8", "9", "10"), [2, 1, 0]),
    "numbers as texts with fractions": (["0.5", "9", "8"] * 10, "regression", 1, None, [0.5, 9, 8]),
    "booleans": ([True, False] * 15, "classification", 2, None, [1, 0, 1]),
    "floats": ([0.5, 1.75, -2.0] * 10, "regression", 1, None, [0.5, 1.75, -2]),
    "whole floats": ([0.0, 1.0, 2.0] * 10, "regression", 1, None, [0, 1, 2]),
    "rows of ones": ([[0, 1], [1, 1], [0, 0]] * 10, "multilabel", 2, None, [[0, 1], [1, 1], [0, 0]]),
    "rows of floats": ([[0.5, 1], [2, 1.5]] * 15, "regression", 2, None, [[0.5, 1], [2, 1.5], [0.5, 1]]),
}
"""By kind of labels: these, and the task, the outputs, the names and the first targets that they mean."""


@pytest.mark.parametrize("kind", LABELS)
def test_labels_keep_their_values(kind: str, hub: dict[str, Any]) -> None:
    labels, task, outputs, names, first = LABELS[kind]
    hub["train"] = Table(None, text=TEXTS, label=labels)
    data = load()
    assert (data.info.task, data.info.num_classes, data.info.class_names) == (task, outputs, names)
    assert data.train.fetch(np.arange(3))[1].tolist() == first


@pytest.mark.parametrize("labels", [[3, -1, 7] * 10, [3.0, -1.0, 7.0] * 10, ["3", "-1", "7"] * 10])
def test_a_regression_on_whole_numbers_takes_their_values(labels: list[Any], hub: dict[str, Any]) -> None:
    hub["train"] = Table(None, text=TEXTS, label=labels)
    data = build_data(HfDataset("there"), val=NO_VAL, seed=0, task="regression")
    assert data.train.fetch(np.arange(3))[1].tolist() == [3, -1, 7]
    hub["train"] = Table(["three", "one", "seven"], text=TEXTS, label=[0, 1, 2] * 10)
    with pytest.raises(ConfigError, match="the classes are names, not numbers to predict"):
        build_data(HfDataset("there"), val=NO_VAL, seed=0, task="regression")


def test_floats_name_classes_if_the_user_says_so(hub: dict[str, Any]) -> None:
    hub["train"] = Table(None, text=TEXTS, label=[0.0, 2.0, 1.0] * 10)
    data = build_data(HfDataset("there"), val=NO_VAL, seed=0, task="classification")
    assert (data.info.num_classes, data.train.fetch(np.arange(3))[1].tolist()) == (3, [0, 2, 1])
    hub["train"] = Table(None, text=TEXTS, label=[0.0, 2.5, 1.0] * 10)
    with pytest.raises(DataError, match=r"label 2.5 of train sample 1 is not a whole number"):
        build_data(HfDataset("there"), val=NO_VAL, seed=0, task="classification")


def test_classes_are_those_of_their_names_in_every_split(hub: dict[str, Any]) -> None:
    named = {"train": ["a", "b", "c"], "validation": ["c", "b", "a", "unused"], "test": None}
    for split, names in named.items():
        labels = ["b", "a", "c"] * 10 if names is None else [names.index(name) for name in "bac"] * 10
        hub[split] = Table(names, text=TEXTS, label=labels)
    data = load()
    for source in (data.train, data.val, data.test):
        assert source.fetch(np.arange(3))[1].tolist() == [1, 0, 2]
    # Read for a model that was trained on another order.
    known = replace(data.info, class_names=("c", "a", "b"))
    data = build_data(HfDataset("there"), val=NO_VAL, seed=0, task="auto", known=known)
    assert data.val.fetch(np.arange(3))[1].tolist() == [2, 1, 0]
    hub["validation"] = Table(["c", "b", "a", "other"], text=TEXTS, label=[0, 3, 1] * 10)
    with pytest.raises(DataError, match="label other does not occur in training"):
        load()


def test_a_list_of_words_is_a_text(hub: dict[str, Any]) -> None:
    hub["train"] = Table(None, text=TEXTS, label=[0, 1, 2] * 10)
    plain = load()
    hub["train"] = Table(None, text=[text.split() for text in TEXTS], label=[0, 1, 2] * 10)
    assert load().train.fetch(np.arange(30))[0].tolist() == plain.train.fetch(np.arange(30))[0].tolist()


NUMBERS = [0, 1, 2] * 10
REJECTED: dict[str, tuple[dict[str, list[Any]], str]] = {
    "a missing label": ({"label": [*NUMBERS[1:], None]}, r"D004 data.label=label: train row 29 has no label"),
    "a label that is no number": ({"label": [0.5, float("nan")] * 15}, "D004 .*train row 1 has no label"),
    "nested labels": ({"label": [{"a": 1}] * 30}, "D004 .*train labels are no numbers"),
    "ragged labels": ({"label": [[0, 1], [1]] * 15}, "D004 .*train labels are no numbers"),
    "negative labels": ({"label": [0, -2, 1] * 10}, "D004 .*label -2 at train sample 1"),
    "a label beyond all others": ({"label": [0, 10**9, 1] * 10}, "D004 .*go up to 1,000,000,000"),
    "captions": ({"label": [f"a dog {row}" for row in range(30)]}, "D004 .*30 of 30 training labels differ"),
    "one class": ({"label": ["a"] * 30}, "D003 .*every training label is a"),
    "a missing text": ({"text": [*TEXTS[1:], None]}, "D005 data.text=text: train row 29 contains None"),
    "nested texts": ({"text": [{"t": "a"}] * 30}, "D005 .*train row 0 contains a dict"),
    "lists of lists": ({"text": [[["a"]]] * 30}, "D005 .*train row 0 contains a list"),
    "numbers for texts": ({"text": NUMBERS}, "D005 .*train row 0 contains the int 0"),
    "no rows": ({"text": [], "label": []}, "D002 .*its train split has no rows"),
}


@pytest.mark.parametrize("kind", REJECTED)
def test_rows_that_do_not_fit_are_named(kind: str, hub: dict[str, Any]) -> None:
    columns, said = REJECTED[kind]
    hub["train"] = Table(None, **{"label": NUMBERS, "text": TEXTS, **columns})
    with pytest.raises(DataError) as caught:
        load()
    assert re.match(said, f"{caught.value.code} {caught.value}"), caught.value


def test_splits_may_lack_a_column(hub: dict[str, Any]) -> None:
    hub["train"] = Table(None, text=TEXTS, label=[0, 1, 2] * 10)
    hub["test"] = Table(None, text=TEXTS)
    assert load().note == "hf: 30 train; test has no labels, so it is left out"
    hub["validation"] = Table(None, text=TEXTS)
    with pytest.raises(DataError, match=r"data.label=label: val row 0 has no label"):
        load()
    hub["validation"] = Table(None, review=TEXTS, label=[0, 1, 2] * 10)
    with pytest.raises(DataError, match="has no column text in its val split"):
        load()


def test_datasets_that_the_package_writes(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    kinds = {"a": datasets.ClassLabel(names=["x", "y"]), "b": datasets.ClassLabel(names=["y", "x"])}
    splits = {}
    for split, kind, labels in (("train", "a", [0, 1] * 6), ("validation", "b", [1, 0] * 6)):
        features = datasets.Features({"text": datasets.Value("string"), "label": kinds[kind]})
        rows = {"text": TEXTS[:12], "label": labels}
        splits[split] = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "named"))
    data = build_data(HfDataset(str(tmp_path / "named")), val=NO_VAL, seed=0, task="auto")
    assert data.info.class_names == ("x", "y")
    assert data.val is not None
    assert data.val.fetch(np.arange(4))[1].tolist() == [0, 1, 0, 1]  # type: ignore[union-attr]


def test_a_model_is_evaluated_on_a_test_split_alone(hub: dict[str, Any]):
    hub["train"] = Table(["bad", "good"], sentence=["a b", "b", "c a a"], label=[0, 1, 1])
    known = load().info
    del hub["train"]
    hub["test"] = Table(["bad", "good"], sentence=["b d", "a"], label=[0, 1])
    data = build_data(HfDataset("there"), val=NO_VAL, seed=0, task="auto", known=known, whole=True)
    assert data.note == "hf: 2 test"
    assert data.test.fetch(np.array([1]))[1].tolist() == [1]


def test_what_does_not_fit(hub: dict[str, Any]):
    with pytest.raises(DataError, match="cannot be loaded: Dataset 'elsewhere' doesn't exist"):
        HfDataset("elsewhere").load(val=NO_VAL, seed=0)
    with pytest.raises(DataError, match="has no train split"):
        load()
    hub["train"] = Table(None, words=["a"], label=[0])
    with pytest.raises(DataError, match="it is unclear which contain inputs and labels"):
        load()
    with pytest.raises(DataError, match=r"data\.text=txt: no such column; there are words, label"):
        load(text="txt")


@pytest.mark.parametrize(("package", "source"), [("datasets", HfDataset("x")), ("tokenizers", None)])
def test_a_missing_package_is_named(
    package: str, source: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
):
    monkeypatch.setitem(sys.modules, package, None)
    if source is None:
        (tmp_path / "train.tsv").write_text("x\t0\ny\t1\n")
        source = TextTsv(str(tmp_path), tokenizer="bert-base-uncased")
    with pytest.raises(MachineError, match=r"Install it with pip install 'ptfast\[hf\]'") as error:
        source.load(val=NO_VAL, seed=0)
    assert error.value.code == "E004"
