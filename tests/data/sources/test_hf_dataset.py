"""Hugging Face datasets, through a stand-in for the package where only its interface matters."""

from __future__ import annotations

import sys
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


def test_images(hub: dict[str, Any]):
    images = [Image.fromarray(np.full((4, 6, 3), i, np.uint8)) for i in range(3)]
    hub["train"] = Table(["x", "y"], image=images, label=[0, 1, 0])
    data = load()
    assert data.info.input_shape == (3, 4, 6)
    assert data.train.fetch(np.array([2]))[0].flatten().tolist() == [2] * 72


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
