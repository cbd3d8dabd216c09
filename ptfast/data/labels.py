"""Checks of labels, made once when the data is read: a bad label on a GPU is an opaque crash hours later."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ptfast.errors import DataError
from ptfast.run import IGNORE_INDEX


def check_labels(labels: Tensor, num_classes: int, split: str) -> None:
    """Raise DataError D004 unless every label is a class below `num_classes` or ignored, and some count."""
    counted = labels[labels != IGNORE_INDEX]
    if not len(counted):
        if not len(labels):
            return
        what = f"every label of the {split} split is {IGNORE_INDEX}, which means ignored"
        hint = "Look at how labels are read: there is nothing to learn"
        raise DataError("D004", what, key="data", suggestion=hint)
    check_range(labels, num_classes, f"{split} sample")


def check_range(
    labels: Tensor, num_classes: int, name: str = "sample", numbers: Sequence[int] | None = None
) -> None:
    """Raise DataError D004 unless every label is a class below `num_classes` or ignored.

    Args:
        labels: first dimension samples.
        name: what a sample is called.
        numbers: of the samples, where they are not 0, 1, 2, ...
    """
    if not labels.numel():
        return
    low, high = (int(bound) for bound in labels.aminmax())
    negative = labels[(labels < 0) & (labels != IGNORE_INDEX)] if low < 0 else labels[:0]
    if negative.numel():
        low = int(negative[0])
        hint = f"Number the classes from 0, or use {IGNORE_INDEX} for samples to ignore"
        what = f"label {low} at {name} {_first(labels, low, numbers):,}"
        raise DataError("D004", what, key="data", suggestion=hint)
    if high >= num_classes:
        place = f"{name} {_first(labels, high, numbers):,}"
        what = f"label {high} at {place}, but there are {num_classes} classes"
        raise DataError("D004", what, key="data", suggestion=f"Labels run from 0 to {num_classes - 1}")


def _first(labels: Tensor, value: int, numbers: Sequence[int] | None) -> int:
    index = int((labels == value).nonzero()[0, 0])
    return index if numbers is None else int(numbers[index])
