"""Checks labels when data is read, because a bad label on a GPU is an opaque crash, maybe hours later."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ptfast.core.errors import DataError, name_some, shorten
from ptfast.core.protocols import IGNORE_INDEX, DataInfo
from ptfast.core.tensors.trees import tensors_in

TargetKind = Literal["whole", "mask", "map", "unknown"]
_CLASSES = "classification", "whole numbers"
_MOST_CLASSES = 10_000
"""Up to this many classes, there may be fewer samples than classes."""
_FEW = 10
"""Up to this many samples may all have different labels."""
_NARROW = (torch.int8, torch.int16, torch.int32)
"""Label types that torch's losses do not accept."""
_COMPUTABLE = {
    torch.bool: torch.uint8,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
_MANY = 100
"""If labels exceed this and skip most numbers below their maximum, they look like amounts."""


def check_labels(labels: Tensor, num_classes: int, split: str, ignore_index: int = IGNORE_INDEX) -> None:
    """Raise DataError D004 unless every label is below `num_classes` or ignored, and not all are ignored."""
    if bool(is_ignored(labels, ignore_index).all()):
        if not len(labels):
            return
        what = f"every label of the {split} split is {ignore_index}, which means ignored"
        hint = "Check how labels are read: there is nothing to learn"
        raise DataError("D004", what, key="data", suggestion=hint)
    check_range(labels, num_classes, f"{split} sample", ignore_index=ignore_index)


def check_range(
    labels: Tensor,
    num_classes: int,
    name: str = "sample",
    numbers: Sequence[int] | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> None:
    """Raise DataError D004 unless every label is a class below `num_classes` or ignored.

    `name` is the word for a sample; `numbers` are the samples' numbers, by default 0, 1, 2, ...
    """
    if not labels.numel():
        return
    masks = labels.dim() > 2
    if ignore_index >= 0:
        # Class 0 is always valid.
        labels = labels.masked_fill(is_ignored(labels, ignore_index), 0)
    low, high = (int(bound) for bound in labels.aminmax())
    negative = labels[(labels < 0) & ~is_ignored(labels, ignore_index)] if low < 0 else labels[:0]
    if not negative.numel() and high < num_classes:
        return
    wrong = int(negative[0]) if negative.numel() else high
    index = int((labels == wrong).nonzero()[0, 0])
    what = f"label {wrong} at {name} {index if numbers is None else numbers[index]:,}"
    unless_ignored = f"set task.ignore_index={wrong} if such pixels do not count"
    if wrong < 0:
        otherwise = unless_ignored if masks else f"use {ignore_index} for samples that do not count"
        hint = f"Number the classes from 0, or {otherwise}"
    else:
        what += f", but there are {num_classes} classes"
        hint = f"Labels run from 0 to {num_classes - 1}" + (f"; {unless_ignored}" if masks else "")
    raise DataError("D004", what, key="data", suggestion=hint)


@dataclass(frozen=True)
class LabelCheck:
    """Checks labels batch by batch, for data whose labels are not all known in advance."""

    num_classes: int | None = None
    """None for labels that are not classes."""
    ignore_index: int = IGNORE_INDEX
    as_classes: bool = False
    """Convert labels that are floats or one-hot rows to class numbers."""
    as_long: bool = False
    """Whether labels are integers, which losses take as int64 or uint8."""

    def __call__(self, raw: Any, numbers: list[int]) -> Any:
        """Return the raw batch of samples `numbers`; raise DataError D004 for a label that is not a class."""
        if isinstance(raw, (tuple, list)) and len(raw) == 2 and signed(raw[1]) is not raw[1]:
            raw = (raw[0], signed(raw[1]))
        if self.as_classes:
            raw = (raw[0], as_classes(raw[1], numbers=numbers), *raw[2:])
        if self.num_classes is not None:
            check_range(raw[1], self.num_classes, numbers=numbers, ignore_index=self.ignore_index)
        if self.as_long and raw[1].dtype in _NARROW:
            raw = (raw[0], raw[1].long(), *raw[2:])
        return raw


def missing_classes(trained: Tensor, held_out: Tensor, names: Sequence[str] | None) -> list[str]:
    """Return the classes in the `trained` labels but not in the `held_out` ones, by name or number."""
    missing = {*trained.tolist()} - {*held_out.tolist(), IGNORE_INDEX}
    return [str(number) if names is None else names[int(number)] for number in sorted(missing)]


def odd_classes(labels: Tensor, num_classes: int, key: str, *, is_stated: bool = False) -> str | None:
    """Return a warning if integer labels may not be classes counted from 0; None if they look right.

    Args:
        key: where the number of classes can be stated.
        is_stated: whether the config says that the labels are classes, not amounts.
    """
    occurring = labels[labels >= 0].unique()
    if not len(occurring):
        return None
    lowest, highest = int(occurring[0]), int(occurring[-1])
    span = f"labels run from {lowest:,} to {highest:,}"
    if num_classes > _MANY and 2 * len(occurring) < num_classes:
        if is_stated:
            return None
        what = f"{span}, and only {len(occurring):,} of {num_classes:,} classes occur"
        return f"{what}. For amounts set task=regression; if they are classes, number those that occur from 0"
    if lowest:
        return f"{span}, so class 0 has no sample. Number the classes from 0, or state their number: {key}"
    return None


def not_finite(raw: Any, numbers: NDArray[np.int64]) -> list[int]:
    """Return the samples with NaN or infinite values, sorted; `numbers` are those of the raw batch."""
    wrong = np.zeros(len(numbers), bool)
    for part in tensors_in(raw):
        if part.is_floating_point() and len(part) == len(wrong):
            wrong |= ~part.reshape(len(part), -1).isfinite().all(1).numpy()
    return sorted(numbers[wrong].tolist())


def unfit_samples(numbers: Sequence[int], consequence: str = "") -> DataError:
    names = ", ".join(f"{number:,}" for number in numbers[:5]) + ", ..." * (len(numbers) > 5)
    what = f"samples contain numbers that are not finite ({names}){consequence}"
    return DataError("D005", what, key="data", suggestion="Leave such samples out, or clean them")


def is_ignored(labels: Tensor, ignore_index: int) -> Tensor:
    if can_hold(labels.dtype, ignore_index):
        return labels == ignore_index
    return torch.zeros_like(labels, dtype=torch.bool)


def can_hold(dtype: torch.dtype, value: int) -> bool:
    if dtype.is_floating_point:
        return True
    if dtype == torch.bool:
        return value in (0, 1)
    return torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max


def signed(labels: Any) -> Any:
    """Convert bool and unsigned types wider than uint8 to types that torch computes with."""
    return labels.to(_COMPUTABLE[labels.dtype]) if getattr(labels, "dtype", None) in _COMPUTABLE else labels


def as_classes(labels: Tensor, name: str = "sample", numbers: Sequence[int] | None = None) -> Tensor:
    """Convert labels to class numbers, (samples,) int64; `name` and `numbers` are as for `check_range`.

    Labels may be whole numbers as floats or in a column, or one-hot rows.
    """
    hint = "Use task=auto, which infers the task, or number the classes from 0"
    if labels.dim() == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dim() == 2:
        places = labels.argmax(1)
        wrong = (labels != torch.zeros_like(labels).scatter_(1, places[:, None], 1)).any(1)
        what = "is not one-hot (zeros and a single 1)"
    elif labels.dim() == 1:
        places = labels.long()
        wrong = labels != places
        what = "is not a whole number, so it names no class"
    else:
        what = f"task=classification takes one class for each sample, not labels of {shape_of(labels)}"
        raise DataError("D004", what, key="task", value="classification", suggestion="Use task=auto")
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0, 0])
        label = "" if labels.dim() == 2 else f" {labels[first].item():g}"
        place = f"{name} {first if numbers is None else numbers[first]:,}"
        raise DataError("D004", f"the label{label} of {place} {what}", key="data", suggestion=hint)
    return places


def kind_of_target(labels: Tensor, input_shape: Sequence[int], task: str) -> TargetKind:
    """Return the `DataInfo.target_kind` for labels of samples whose inputs have `input_shape`."""
    shape, pixels = tuple(labels.shape[1:]), tuple(input_shape[1:])
    if len(input_shape) == 3 and shape in (pixels, (1, *pixels)):
        return "map" if labels.is_floating_point() or task == "regression" else "mask"
    if math.prod(shape) == 1 or task in ("classification", "multilabel"):
        return "whole"
    ones = len(shape) == 1 and not labels.is_floating_point() and bool(((labels == 0) | (labels == 1)).all())
    return "whole" if ones or len(input_shape) != 3 else "unknown"


def infer_task(labels: Tensor, target_kind: str) -> tuple[str, str]:
    """Return the task that sample labels imply, and the reason for the panel; not for token labels."""
    if target_kind == "mask":
        return "semantic_segmentation", "whole numbers for each pixel"
    if target_kind == "map":
        return "regression", "floats for each pixel"
    if labels.dim() > 2:
        what = f"the task of labels of {shape_of(labels)} cannot be told"
        hint = "Set task to a built-in one, or to the import path of your own, such as task=mine.Boxes"
        raise DataError("D004", what, key="data", suggestion=hint)
    floats, several = labels.is_floating_point(), labels.dim() == 2 and labels.shape[1] > 1
    if not floats and labels.dim() < 2:
        return _CLASSES
    # A single row of floats may consist of zeros and ones by chance.
    are_ones = bool(((labels == 0) | (labels == 1)).all())
    if labels.dim() == 2 and are_ones and (not floats or (several and len(labels) > 1)):
        one_each = several and bool((labels.sum(1) == 1).all())
        words = "a single 1 each; task=classification takes its place for the class"
        return "multilabel", words if one_each else "zeros and ones"
    if not floats:
        return ("regression", f"{labels.shape[1]} whole numbers each") if several else _CLASSES
    if not several and bool((labels == labels.round()).all()):
        return "regression", "floats, all whole numbers; task=classification takes them for classes"
    return "regression", "floats"


def count_classes(labels: Tensor, num_samples: int | None = None) -> int:
    """Return the highest label plus one; raise D004 for more than 10,000 classes with fewer samples."""
    counted = labels[labels != IGNORE_INDEX]
    found = int(counted.max()) + 1 if counted.numel() else 1
    if found > max(len(labels) if num_samples is None else num_samples, _MOST_CLASSES):
        what = f"{len(labels):,} labels go up to {found - 1:,}, which would be as many classes"
        hint = "Number the classes from 0, or predict the labels as numbers with task=regression"
        raise DataError("D004", what, key="data", suggestion=hint)
    return found


def number_names(
    labels: Mapping[str, Sequence[str]],
    known: Sequence[str] | None = None,
    *,
    key: str = "data",
    value: Any = None,
    place: Callable[[str, int], str] = lambda split, row: f"{split} sample {row:,}",
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the `DataInfo` fields for classes (`known`, or from training), and class numbers by split.

    Args:
        key, value: of the config, for errors about the labels.
        place: describes a row of a split in errors.

    Raises:
        DataError: D003 if there is only one class, D004 for a label that is not a class, or if most training
            labels differ, as captions do.
    """
    names, size = tuple(known or sorted(set(labels["train"]))), len(labels["train"])
    if not known:
        example = shorten(names[0], 40)
        if len(names) == 1:
            what = f"every training label is {example}, so there is nothing to classify"
            raise DataError("D003", what, key=key, value=value)
        if size > _FEW and 2 * len(names) > size:
            what = f"{len(names):,} of {size:,} training labels differ, as captions do ({example})"
            hint = "Give each sample the name of its class"
            raise DataError("D004", what, key=key, value=value, suggestion=hint)
        with contextlib.suppress(ValueError):
            names = tuple(sorted(names, key=float))
    numbers, targets = {name: i for i, name in enumerate(names)}, dict[str, Tensor]()
    for split, own in labels.items():
        row = next((row for row, label in enumerate(own) if label not in numbers), None)
        if row is not None:
            what = f"{place(split, row)}: label {shorten(own[row], 40)} does not occur in training"
            hint = f"Training has {name_some(names, 10)}"
            raise DataError("D004", what, key=key, value=value, suggestion=hint)
        targets[split] = torch.tensor([numbers[label] for label in own])
    return {"task": "classification", "num_classes": len(names), "class_names": names}, targets


def as_floats(labels: Sequence[str]) -> Tensor | None:
    """Return labels as float32; None unless all are numbers."""
    try:
        return torch.tensor([float(label) for label in labels], dtype=torch.float32)
    except ValueError:
        return None


def describe_text_labels(
    labels: Mapping[str, Sequence[str]], known: DataInfo | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the `DataInfo` fields implied by text labels, and each split's targets.

    Numbers are regression targets if some have a fraction, or if the model was trained on such targets
    (`known`); all other labels are class names.
    """
    values: dict[str, Tensor] = {}
    for split, own in labels.items():
        if (found := as_floats(own)) is not None and bool(found.isfinite().all()):
            values[split] = found
    is_number = len(values) == len(labels) and bool((values["train"] % 1 != 0).any())
    if known.task == "regression" if known else is_number:
        if len(values) < len(labels):
            raise DataError("D004", "has labels that are no numbers, which the model predicts", key="data")
        return {"task": "regression", "num_classes": 1, "task_reason": "numbers with fractions"}, values
    return number_names(labels, known.class_names if known else None)


def differing_names(names: Sequence[str], known: Sequence[str], who: str) -> str:
    """Describe how class names differ from the known ones; `who` describes unknown ones. Order is ignored."""
    unknown, missing = sorted({*names} - {*known}), sorted({*known} - {*names})
    parts = [f"has {', '.join(unknown[:3])}, {who}"] if unknown else []
    parts += [f"lacks {', '.join(missing[:3])}"] if missing else []
    return " and ".join(parts)


def shape_of(labels: Tensor) -> str:
    """Return the shape of one label, in words."""
    return f"shape {'x'.join(map(str, labels.shape[1:]))}"
