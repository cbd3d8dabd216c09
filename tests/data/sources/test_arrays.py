"""Arrays: what their types say, and labels that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ptfast.core.durations import Duration
from ptfast.core.errors import DataError
from ptfast.data.build_data import build_data
from ptfast.data.new_inputs import read_inputs
from ptfast.data.sources.arrays import Arrays

RNG = np.random.default_rng(0)
VECTORS = RNG.normal(3, 2, (20, 5))
CLASSES = np.arange(20) % 4


def load(path: Path, task: str = "auto", **kwargs: Any) -> Any:
    return build_data(Arrays(str(path), **kwargs), val=Duration(0, "percent"), seed=0, task=task)


def save(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("x", "y", "kind", "task", "num_classes", "shape"),
    [
        (VECTORS, CLASSES, "features", "classification", 4, (5,)),
        (VECTORS, VECTORS[:, 0], "features", "regression", 1, (5,)),
        (VECTORS, VECTORS[:, :2], "features", "regression", 2, (5,)),
        (VECTORS, RNG.integers(0, 2, (20, 3)), "features", "multilabel", 3, (5,)),
        (RNG.integers(0, 256, (20, 6, 8), dtype=np.uint8), CLASSES, "image", "classification", 4, (1, 6, 8)),
        (
            RNG.integers(0, 256, (20, 6, 8, 3), dtype=np.uint8),
            CLASSES,
            "image",
            "classification",
            4,
            (3, 6, 8),
        ),
        (
            RNG.integers(0, 256, (20, 3, 6, 8), dtype=np.uint8),
            CLASSES,
            "image",
            "classification",
            4,
            (3, 6, 8),
        ),
    ],
)
def test_types_tell_what_arrays_are(
    tmp_path: Path, x: Any, y: Any, kind: str, task: str, num_classes: int, shape: tuple[int, ...]
):
    info = load(save(tmp_path / "a.npz", x=x, y=y)).info
    assert (info.kind, info.task, info.num_classes, info.input_shape) == (kind, task, num_classes, shape)
    json.dumps(info.extra)


def test_splits_are_found_by_name_and_a_pair_of_npy_is_a_training_split(tmp_path: Path):
    path = save(tmp_path / "a.npz", train_x=VECTORS, train_y=CLASSES, test_x=VECTORS[:8], test_y=CLASSES[:8])
    assert load(path).note == "arrays: 20 train, 8 test"
    np.save(tmp_path / "x.npy", VECTORS)
    np.save(tmp_path / "y.npy", CLASSES)
    assert len(load(tmp_path / "x.npy", targets=str(tmp_path / "y.npy")).train) == 20


def test_a_column_that_never_changes_is_not_blown_up(tmp_path: Path):
    vectors = VECTORS.copy()
    vectors[:, 2] = 0.1
    info = load(save(tmp_path / "a.npz", x=vectors, y=CLASSES)).info
    assert info.extra["normalize"]["std"][2] == 1
    assert np.allclose(info.extra["normalize"]["mean"], vectors.mean(0), atol=1e-6)


def test_the_task_decides_the_type_of_the_labels(tmp_path: Path):
    data = load(save(tmp_path / "a.npz", x=VECTORS, y=CLASSES), task="regression")
    assert data.train.fetch(np.arange(3))[1].dtype == torch.float32
    assert (data.info.task, data.info.num_classes) == ("regression", 1)


@pytest.mark.parametrize(
    ("arrays", "code", "line"),
    [
        ({"x": VECTORS, "y": np.where(CLASSES == 3, -1, CLASSES)}, "D004", "label -1 at train sample 3"),
        ({"x": VECTORS, "y": np.full(20, -100)}, "D004", "every label of the train split is -100"),
        (
            {"x": VECTORS, "y": CLASSES, "val_x": VECTORS, "val_y": CLASSES + 1},
            "D004",
            "label 4 at val sample 3, but there are 4 classes",
        ),
        ({"x": VECTORS, "y": CLASSES[:7]}, "D005", "20 inputs but 7 targets"),
        ({"x": VECTORS[:0], "y": CLASSES[:0]}, "D002", "no samples"),
        ({"z": VECTORS}, "D005", "has no train_x and train_y, nor x and y; it contains z"),
        (
            {"x": np.where(VECTORS > 8, np.nan, VECTORS * 3), "y": VECTORS[:, 0] * np.inf},
            "D004",
            "not finite",
        ),
        ({"x": np.full((20, 5), np.nan), "y": CLASSES}, "D005", "sample 0 contains nan in column 0"),
        ({"x": np.array(["a"] * 20), "y": CLASSES}, "D005", "<U1 cannot be an input"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path: Path, arrays: dict[str, Any], code: str, line: str):
    with pytest.raises(DataError, match=line) as error:
        load(save(tmp_path / "a.npz", **arrays))
    assert error.value.code == code


def test_files_that_are_none(tmp_path: Path):
    with pytest.raises(DataError, match="no such file"):
        load(tmp_path / "a.npz")
    (tmp_path / "b.npz").write_bytes(b"PK nonsense")
    with pytest.raises(DataError, match=r"is not a readable \.npz"):
        load(tmp_path / "b.npz")
    np.save(tmp_path / "c.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(DataError, match=r"is not a readable \.npy"):
        load(tmp_path / "c.npy", targets=str(tmp_path / "c.npy"))
    with pytest.raises(DataError, match=r"is not an \.npz or \.npy\. Write one: numpy\.savez"):
        load(save(tmp_path / "d.npz", x=VECTORS, y=CLASSES).rename(tmp_path / "d.csv"))


def test_prediction_normalizes_vectors_as_training_did(tmp_path: Path):
    info = load(save(tmp_path / "a.npz", x=VECTORS, y=CLASSES)).info
    np.save(tmp_path / "new.npy", VECTORS)
    batches = list(read_inputs(info, [str(tmp_path / "new.npy")], device=torch.device("cpu"), batch_size=8))
    assert [len(names) for names, _ in batches] == [8, 8, 4]
    assert batches[1][0][0] == f"{tmp_path / 'new.npy'}[8]"
    inputs = torch.cat([inputs for _, inputs in batches])
    assert float(inputs.mean(0).abs().max()) < 1e-5
