"""Hugging Face datasets, through a stand-in for the package where only its interface matters."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ptfast.core.durations import Duration
from ptfast.core.errors import DataError, MachineError
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
        return len(self.columns["label"])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The dataset that the stand-in finds under the name `there`."""
    content: dict[str, Any] = {}
    module = ModuleType("datasets")

    def load_dataset(path: str, name: str | None = None) -> Any:
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
    assert data.note == "hf: 3 train, 1 val"
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
            "row 1 of train: holds integers from 70000 to 70000",
        ),
    ],
)
def test_an_image_that_cannot_be_read_is_named_by_its_row(tmp_path: Path, image: Any, said: str):
    good = Image.fromarray(np.zeros((4, 4, 3), np.uint8))
    with pytest.raises(DataError, match=said):
        load_from(images_on_disk(tmp_path, [good, image, good]))


def test_what_does_not_fit(hub: dict[str, Any]):
    with pytest.raises(DataError, match="cannot be loaded: Dataset 'elsewhere' doesn't exist"):
        HfDataset("elsewhere").load(val=NO_VAL, seed=0)
    with pytest.raises(DataError, match="has no train split"):
        load()
    hub["train"] = Table(None, words=["a"], label=[0])
    with pytest.raises(DataError, match="it is unclear which hold inputs and labels"):
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
