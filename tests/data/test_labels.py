"""The task that labels stand for: inferred, shown in the panel, and changed by the key that it names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import train
from test_custom_dataset import NO_VAL, loader
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from ptfast.core.errors import DataError
from ptfast.data.build_data import build_data
from ptfast.data.sources.arrays import Arrays

INPUTS = torch.randn(6, 4)
FLOATS = torch.tensor([0.0, 1, 2, 0, 1, 2])
ONES = torch.eye(3).repeat(2, 1)


class Each(Dataset[Any]):
    """Samples one by one."""

    def __init__(self, targets: Tensor) -> None:
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        return INPUTS[index], self.targets[index]


class Stream(IterableDataset[Any]):
    """The same in a stream."""

    num_classes = 3

    def __init__(self, targets: Tensor) -> None:
        self.targets = targets

    def __iter__(self) -> Iterator[Any]:
        return zip(INPUTS, self.targets, strict=True)


def load(dataset: Any, task: str = "auto") -> Any:
    return build_data(dataset, val=NO_VAL, seed=0, task=task, normalize=False)


def arrays(folder: Path, targets: Tensor) -> Arrays:
    np.savez(folder / "a.npz", x=INPUTS.numpy(), y=targets.numpy())
    return Arrays(str(folder / "a.npz"))


PLACES = "a single 1 each; task=classification takes its place for the class"


@pytest.mark.parametrize(
    ("targets", "task", "reason"),
    [
        (FLOATS.long(), "classification", "whole numbers"),
        (FLOATS, "regression", "floats, all whole numbers; task=classification takes them for classes"),
        (FLOATS + 0.5, "regression", "floats"),
        (ONES.long(), "multilabel", PLACES),
        (ONES, "multilabel", PLACES),
        ((ONES + ONES.roll(1, 0)).clamp(max=1), "multilabel", "zeros and ones"),
        (ONES + 0.5, "regression", "floats"),
        ((ONES + ONES.roll(1, 0)).clamp(max=1).long(), "multilabel", "zeros and ones"),
        (torch.arange(12).view(6, 2), "regression", "2 whole numbers each"),
        (torch.arange(6)[:, None], "classification", "whole numbers"),
    ],
)
def test_the_task_and_what_tells_it(targets: Tensor, task: str, reason: str, tmp_path: Path) -> None:
    for dataset in (TensorDataset(INPUTS, targets), Each(targets), arrays(tmp_path, targets)):
        info = load(dataset).info
        assert (info.task, info.task_reason) == (task, reason)


def test_floats_of_named_classes_are_all_looked_at() -> None:
    class Named(Dataset[Any]):
        classes = ("a", "b", "c")

        def __len__(self) -> int:
            return len(ONES)

        def __getitem__(self, index: int) -> Any:
            return INPUTS[index], ONES[index]

    info = load(Named()).info
    assert (info.task, info.class_names, info.num_classes) == ("multilabel", Named.classes, 3)


@pytest.mark.parametrize("targets", [FLOATS, FLOATS[:, None], ONES, ONES.long()])
def test_labels_that_name_classes_otherwise_are_translated_for_classification(
    targets: Tensor, tmp_path: Path
) -> None:
    for dataset in (
        TensorDataset(INPUTS, targets),
        Each(targets),
        arrays(tmp_path, targets),
        Stream(targets),
    ):
        data = load(dataset, "classification")
        assert (data.info.task, data.info.num_classes) == ("classification", 3)
        stream = loader(data, batch_size=6, micro_batches=1)
        (inputs, labels), _ = next(stream.steps(0, 1)).micro_batches[0]
        where = (inputs[:, None] == INPUTS).all(2).int().argmax(1)
        assert labels.dtype == torch.int64
        assert torch.equal(labels, FLOATS.long()[where])


@pytest.mark.parametrize(
    ("targets", "line"),
    [
        (FLOATS + torch.tensor([0, 0, 0.5, 0, 0, 0]), "the label 2.5 of .*sample 2 is not a whole number"),
        (
            ONES.index_fill(0, torch.tensor(4), 1),
            "the label of .*sample 4 is not one-hot",
        ),
        (-FLOATS, "label -1 at train sample 1"),
    ],
)
def test_labels_that_name_no_class_are_refused(targets: Tensor, line: str, tmp_path: Path) -> None:
    for dataset in (TensorDataset(INPUTS, targets), Each(targets), arrays(tmp_path, targets)):
        with pytest.raises(DataError, match=line) as caught:
            load(dataset, "classification")
        assert caught.value.code == "D004"


class Odd(Dataset[Any]):
    """A sample of any structure."""

    def __init__(self, sample: Any) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.sample


@pytest.mark.parametrize(
    ("sample", "what"),
    [
        ((INPUTS[0],), "a Tensor of .*"),
        (INPUTS[0], "a Tensor of .*"),
        ((INPUTS[0], {"boxes": INPUTS[1]}), "a Tensor .* and a dict with the keys boxes"),
        ((INPUTS[0], (INPUTS[1], 0)), "a Tensor .* and a list of 2, the first a Tensor .*"),
        (({"a": "text"}, 0), "a dict with the keys a and a Tensor of int64 .*"),
    ],
)
def test_samples_that_are_no_pairs_are_for_a_task_of_ones_own(sample: Any, what: str) -> None:
    line = rf"task=auto: takes samples of \(input, target\), and this data has .* {what}\. .*task=mine\.Task"
    with pytest.raises(DataError, match=line) as caught:
        load(Odd(sample))
    assert caught.value.code == "D004"
    assert load(Odd(sample), "mine.Task").info.kind == "other"
    assert load(Odd(sample), "hf").info.kind == "other"


def floats(num_samples: int = 40) -> TensorDataset:
    """Points on a line, whose classes are floats."""
    points = torch.linspace(-1, 1, num_samples)[:, None]
    return TensorDataset(points.expand(-1, 4), (points[:, 0] > 0).float())


def test_the_panel_says_what_is_trained_for(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("data=custom", "data._target_=test_labels.floats", "model.hidden=[4]", "epochs=1")
    rows = {
        "task=auto": "task=regression because of the labels: floats, all whole numbers; "
        "task=classification takes them for classes",
        "task=classification": "task classification of 2 classes model",
    }
    for word, row in rows.items():
        assert train(*words, word) == 0
        assert row in " ".join(capsys.readouterr().out.split())


def test_classes_that_a_held_out_split_lacks_are_named(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    labels = np.array([0] * 20 + [1] * 19 + [2])
    words = ("data=arrays", "model.hidden=[4]", "epochs=1", "batch_size=10")
    for name, val in (("whole", labels), ("one", labels.clip(0, 1)), ("two", labels * 0)):
        np.savez(f"{name}.npz", train_x=x, train_y=labels, val_x=x, val_y=val)
        assert train(*words, f"data.path={name}.npz", f"run.dir={name}") == 0
        captured = capsys.readouterr()
        said = {
            "whole": [],
            "one": ["warning: data: val has no sample of class 2, which train has"],
            "two": ["warning: data: val has no sample of classes 1, 2, which train has"],
        }
        text = (captured.out + captured.err).splitlines()
        assert [line for line in text if "no sample of" in line] == said[name]
    # The only sample of class 2 is never held out, so that a warning follows.
    np.savez("none.npz", x=x, y=labels)
    assert train(*words, "data.path=none.npz", "data.val=50%", "run.dir=none") == 0
    captured = capsys.readouterr()
    assert "val has no sample of class 2, which train has" in captured.out + captured.err


@pytest.mark.parametrize(
    ("labels", "task", "attributes", "warning"),
    [
        ([1, 2, 3], "auto", {}, "labels run from 1 to 3, so class 0 has no sample"),
        ([1, 2, 3], "classification", {}, "labels run from 1 to 3, so class 0 has no sample"),
        ([1, 2, 3], "auto", {"num_classes": 4}, None),
        ([1, 2, 3], "regression", {}, None),
        ([0, 1, 3], "auto", {}, None),
        (
            [1_205, 990, 2_996],
            "auto",
            {},
            "only 3 of 2,997 classes occur. For amounts set task=regression",
        ),
        ([1_205, 990, 2_996], "classification", {}, None),
        ([1_205, 990, 2_996], "regression", {}, None),
    ],
)
@pytest.mark.parametrize("kind", ["held", "custom", "arrays"])
def test_whole_numbers_that_look_like_no_classes_are_warned_of(
    labels: list[int], task: str, attributes: dict[str, int], warning: str | None, kind: str, tmp_path: Path
) -> None:
    targets = torch.tensor(labels * 10)
    dataset: Any = TensorDataset(torch.randn(30, 4), targets)
    if kind == "custom":
        dataset = Pairs(dataset)
    vars(dataset).update(attributes)
    if kind == "arrays":
        np.savez(tmp_path / "a.npz", x=np.zeros((30, 4), "f4"), y=targets.numpy())
        dataset = Arrays(str(tmp_path / "a.npz"), **attributes)
    found = build_data(dataset, val=NO_VAL, seed=0, task=task).warning
    assert found is None if warning is None else warning in str(found)


class Pairs(Dataset[Any]):
    """Items of another dataset."""

    def __init__(self, held: TensorDataset) -> None:
        self.held = held

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, index: int) -> Any:
        return self.held[index]


def test_the_warning_is_shown(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("data=custom", "data._target_=test_labels.from_one", "model.hidden=[4]", "epochs=1")
    assert train(*words) == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert (
        "warning: data: labels run from 1 to 2, so class 0 has no sample. Number the classes from 0" in said
    )


def from_one() -> TensorDataset:
    return TensorDataset(torch.randn(40, 4), torch.arange(40) % 2 + 1)
