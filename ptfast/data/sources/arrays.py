"""Arrays on disk: `.npz`, or pairs of `.npy`, of images or of feature vectors."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ptfast.core.durations import Duration
from ptfast.core.errors import DataError
from ptfast.core.protocols import IGNORE_INDEX, DataInfo
from ptfast.core.sections.section import Count
from ptfast.data.dataset import Splits
from ptfast.data.label_checks import check_labels, infer_task, kind_of_target
from ptfast.data.map_source import TensorSource, as_tensor

_TRAIN_NAMES = (
    ("train_x", "train_y"),
    ("x_train", "y_train"),
    ("x", "y"),
    ("images", "labels"),
    ("data", "targets"),
)
_SPLIT_NAMES = {
    "val": (("val_x", "val_y"), ("x_val", "y_val")),
    "test": (("test_x", "test_y"), ("x_test", "y_test")),
}
_FEW_CHANNELS = (1, 3, 4)
_MOST_CLASSES = 10_000
"""That fewer samples than classes may tell of."""


class Arrays:
    """Inputs and targets as numpy arrays.

    What they are is told by their types. Inputs of uint8 with 3 or 4 dimensions are images, (samples, height,
    width), with the channels last or first; others are features, flattened. Targets that are whole numbers
    are classes, floats are figures to predict, and a matrix of 0 and 1 is several labels for each sample. Of
    images, targets of (height, width) say it of each pixel.

    Args:
        path: `.npz` with `train_x` and `train_y` (or `x` and `y`), and perhaps `val_x`, `val_y`, `test_x`,
            `test_y`; or the inputs as `.npy`, with `targets`.
        targets: the `.npy` of targets that goes with inputs in a `.npy`.
        num_classes: where the labels that occur do not show it.

    Raises:
        DataError: D001, D002, D004 or D005 by `load`, naming the file and the array.
    """

    name = "arrays"

    def __init__(self, path: str, targets: str | None = None, num_classes: Count | None = None) -> None:
        self.path = Path(path).expanduser()
        self.targets = Path(targets).expanduser() if targets is not None else None
        self.num_classes = num_classes

    def load(self, *, val: Duration, seed: int) -> Splits:
        pairs = {split: _tensors(*pair, self.path, split) for split, pair in self._read().items()}
        train_inputs, train_targets, images = pairs["train"]
        for split, (inputs, targets, _) in pairs.items():
            if inputs.shape[1:] != train_inputs.shape[1:] or targets.shape[1:] != train_targets.shape[1:]:
                what = f"the {split} arrays have samples of another shape than the training ones"
                raise DataError("D005", what, key="data.path", value=self.path)
        shape = tuple(train_inputs.shape[1:])
        if images:
            shape = (shape[2], *shape[:2])
        kind = kind_of_target(train_targets, shape, "auto")
        task, reason = infer_task(train_targets, kind)
        num_classes = self._num_classes(task, kind, train_targets)
        if task == "classification":
            for split, (_, targets, _) in pairs.items():
                check_labels(targets, num_classes or 1, split)
        sources = {
            split: TensorSource(inputs, targets, images=images)
            for split, (inputs, targets, _) in pairs.items()
        }
        info = DataInfo(
            kind="image" if images else "features",
            task=task,
            task_reason=reason,
            target_kind="whole" if task == "multilabel" else kind,
            num_classes=num_classes,
            input_shape=shape,
            in_channels=shape[0] if images else None,
        )
        return Splits.of(info, sources)

    def _read(self) -> dict[str, tuple[NDArray, NDArray]]:
        if self.path.suffix != ".npz":
            if self.path.suffix != ".npy":
                what, hint = (
                    "is not an .npz or .npy",
                    "Write one: numpy.savez('data.npz', x=inputs, y=targets)",
                )
                raise DataError("D005", what, key="data.path", value=self.path, suggestion=hint)
            if self.targets is None:
                hint = "Set data.targets to the .npy of the targets"
                raise DataError("D001", "has no targets", key="data.path", value=self.path, suggestion=hint)
            return {"train": (read_npy(self.path), read_npy(self.targets, key="data.targets"))}
        arrays = read_npz(self.path)
        names = {
            split: _find(arrays, known) for split, known in (("train", _TRAIN_NAMES), *_SPLIT_NAMES.items())
        }
        if names["train"] is None:
            what = f"has no train_x and train_y, nor x and y; it holds {', '.join(arrays) or 'nothing'}"
            raise DataError("D005", what, key="data.path", value=self.path)
        return {
            split: (arrays[pair[0]], arrays[pair[1]]) for split, pair in names.items() if pair is not None
        }

    def _num_classes(self, task: str, kind: str, targets: Tensor) -> int | None:
        if kind == "mask":
            # Counted where it is known which label does not count.
            return self.num_classes
        if task != "classification":
            return targets.shape[1] if targets.dim() > 1 and kind != "map" else 1
        counted = targets[targets != IGNORE_INDEX]
        found = int(counted.max()) + 1 if len(counted) else 1
        if self.num_classes is None and found > max(len(targets), _MOST_CLASSES):
            what = f"{len(targets):,} labels go up to {found - 1:,}, which would be as many classes"
            hint = "Number the classes from 0, set data.num_classes, or give figures to predict as floats"
            raise DataError("D004", what, key="data.path", value=self.path, suggestion=hint)
        return self.num_classes or found


def read_npz(path: Path, key: str = "data.path") -> dict[str, NDArray]:
    """The arrays of an `.npz`, none of them pickled."""
    _check_file(path, key)
    try:
        with np.load(path, allow_pickle=False) as archive:
            return dict(archive)
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        what = f"is not a readable .npz: {_reason(error)}"
        raise DataError("D005", what, key=key, value=path) from None


def read_npy(path: Path, key: str = "data.path") -> NDArray:
    """The array of an `.npy`, not pickled."""
    _check_file(path, key)
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError("D005", f"is not a readable .npy: {_reason(error)}", key=key, value=path) from None
    if not isinstance(array, np.ndarray):
        raise DataError("D005", "is an archive, not an .npy", key=key, value=path)
    return array


def as_inputs(array: NDArray, where: str) -> tuple[Tensor, bool]:
    """Inputs as a loader takes them, and whether they are images: uint8 channels last, or float32 vectors."""
    if array.dtype.kind not in "buif" or array.ndim == 0:
        raise DataError("D005", f"{array.dtype} cannot be an input", key=where)
    if array.dtype == np.uint8 and array.ndim in (3, 4):
        if array.ndim == 3:
            array = array[..., None]
        elif array.shape[3] not in _FEW_CHANNELS and array.shape[1] in _FEW_CHANNELS:
            array = array.transpose(0, 2, 3, 1)
        return as_tensor(np.ascontiguousarray(array)), True
    vectors = array.reshape(len(array), -1).astype(np.float32, copy=False)
    if not np.isfinite(vectors).all():
        sample, column = (int(i) for i in np.argwhere(~np.isfinite(vectors))[0])
        what = f"sample {sample:,} holds {vectors[sample, column]} in column {column}"
        raise DataError("D005", what, key=where, suggestion="Replace or drop such samples")
    return as_tensor(vectors), False


def _tensors(inputs: NDArray, targets: NDArray, path: Path, split: str) -> tuple[Tensor, Tensor, bool]:
    where = f"{path} ({split})"
    if len(inputs) != len(targets):
        raise DataError("D005", f"{len(inputs):,} inputs but {len(targets):,} targets", key=where)
    if len(inputs) == 0:
        raise DataError("D002", "no samples", key=where)
    if targets.dtype.kind not in "buif":
        raise DataError("D004", f"targets of type {targets.dtype} are not numbers", key=where)
    if targets.ndim == 2 and targets.shape[1] == 1:
        targets = targets[:, 0]
    tensor, images = as_inputs(inputs, where)
    if targets.ndim == 4 and targets.shape[3] == 1:
        targets = targets[..., 0]
    masks = images and targets.ndim > 2 and targets.dtype == np.uint8
    if not masks:
        targets = targets.astype(np.float32 if targets.dtype.kind == "f" else np.int64, copy=False)
    if not np.isfinite(targets).all():
        raise DataError("D004", "targets that are not finite", key=where)
    return tensor, as_tensor(targets), images


def _find(arrays: dict[str, NDArray], known: tuple[tuple[str, str], ...]) -> tuple[str, str] | None:
    return next((pair for pair in known if pair[0] in arrays and pair[1] in arrays), None)


def _check_file(path: Path, key: str) -> None:
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "no such file"
        raise DataError("D001", what, key=key, value=path)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    if "pickle" in str(error):
        # numpy advises to load them, which would run whatever they say.
        return "it holds Python objects in place of numbers, or something else than arrays"
    return lines[0] if lines else type(error).__name__
