"""Arrays on disk: an `.npz`, or a pair of `.npy` files, of images or feature vectors."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ptfast.core.durations import Duration
from ptfast.core.errors import DataError
from ptfast.core.protocols import DataInfo
from ptfast.core.sections.section import Count
from ptfast.data.dataset import ReadsAsKnown, Splits
from ptfast.data.label_checks import infer_task, kind_of_target
from ptfast.data.map_source import TensorSource, as_tensor
from ptfast.data.tables.columns import check_file

_NAMES = {
    "train": (
        ("train_x", "train_y"),
        ("x_train", "y_train"),
        ("x", "y"),
        ("images", "labels"),
        ("data", "targets"),
    ),
    "val": (("val_x", "val_y"), ("x_val", "y_val")),
    "test": (("test_x", "test_y"), ("x_test", "y_test")),
}
"""Accepted names of inputs and targets in an `.npz`, by split."""
_FEW_CHANNELS = (1, 3, 4)


class Arrays(ReadsAsKnown):
    """Inputs and targets as numpy arrays.

    Types and shapes decide their meaning. uint8 inputs with 3 or 4 dimensions are images, (samples, height,
    width), with channels last or first; other inputs are flattened to features. Whole-number targets are
    classes, floats are regression targets, and a matrix of 0 and 1 is multi-label. Images may have targets of
    (height, width), one for each pixel.

    Args:
        path: `.npz` with `train_x` and `train_y` (or `x` and `y`), and perhaps `val_x`, `val_y`, `test_x`,
            `test_y`; or the inputs as `.npy`, with `targets`.
        targets: the `.npy` of targets that goes with inputs in a `.npy`.
        num_classes: number of classes, if the labels that occur do not show it.

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
        return Splits.of(info, sources, classes_from=None if self.num_classes else "data.num_classes")

    def _read(self) -> dict[str, tuple[NDArray, NDArray]]:
        if self.path.suffix == ".npy":
            if self.targets is None:
                hint = "Set data.targets to the .npy of the targets"
                raise DataError("D001", "has no targets", key="data.path", value=self.path, suggestion=hint)
            inputs = read_arrays(self.path, archive=False)
            return {"train": (inputs[""], read_arrays(self.targets, "data.targets", archive=False)[""])}
        if self.path.suffix != ".npz":
            hint = "Write one: numpy.savez('data.npz', x=inputs, y=targets)"
            what = "is not an .npz or .npy"
            raise DataError("D005", what, key="data.path", value=self.path, suggestion=hint)
        arrays, pairs = read_arrays(self.path, archive=True), dict[str, tuple[NDArray, NDArray]]()
        for split, known in _NAMES.items():
            for inputs, targets in known:
                if split not in pairs and inputs in arrays and targets in arrays:
                    pairs[split] = arrays[inputs], arrays[targets]
        pairs = self.complete(pairs)
        if "train" not in pairs:
            what = f"has no train_x and train_y, nor x and y; it contains {', '.join(arrays) or 'nothing'}"
            raise DataError("D005", what, key="data.path", value=self.path)
        return pairs

    def _num_classes(self, task: str, kind: str, targets: Tensor) -> int | None:
        if kind == "mask" or task == "classification":
            # Classes are counted later, once the task and the ignored label are known.
            return self.num_classes
        return targets.shape[1] if targets.dim() > 1 and kind != "map" else 1


def read_arrays(path: Path, key: str = "data.path", *, archive: bool) -> dict[str, NDArray]:
    """Return the arrays of an `.npz` by name, or an `.npy` under an empty name; reject pickled objects.

    Raises:
        DataError: D001 if there is no such file, D005 if it cannot be read.
    """
    check_file(path, key)
    suffix = ".npz" if archive else ".npy"
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            arrays = {"": found}
        else:
            with found:
                arrays = dict(found)
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if "pickle" in str(error):
            # numpy suggests unpickling them, which would run any code that they contain.
            reason = "it contains Python objects in place of numbers, or something else than arrays"
        raise DataError("D005", f"is not a readable {suffix}: {reason}", key=key, value=path) from None
    if archive == ("" in arrays):
        what = f"is {'a single array' if archive else 'an archive'}, not an {suffix}"
        raise DataError("D005", what, key=key, value=path)
    return arrays


def as_inputs(array: NDArray, where: str) -> tuple[Tensor, bool]:
    """Return inputs for a loader, and whether they are images: uint8 channels last, or float32 vectors."""
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
        what = f"sample {sample:,} contains {vectors[sample, column]} in column {column}"
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
        raise DataError("D004", "targets are not finite", key=where)
    return tensor, as_tensor(targets), images
