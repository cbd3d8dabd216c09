"""Checks of labels, made once when the data is read: a bad label on a GPU is an opaque crash hours later."""

from __future__ import annotations

from torch import Tensor

from ptfast.errors import DataError

IGNORE_INDEX = -100
"""The label that torch's losses skip."""


def check_labels(labels: Tensor, num_classes: int, split: str) -> None:
    """Raise DataError D004 unless every label is a class below `num_classes` or ignored, and some count."""
    counted = labels[labels != IGNORE_INDEX]
    if not len(counted):
        if not len(labels):
            return
        raise DataError(
            "D004", f"every label of the {split} split is {IGNORE_INDEX}, which means ignored", key="data"
        )
    low, high = int(counted.min()), int(counted.max())
    if low < 0:
        where = _first(labels, low)
        hint = f"Number the classes from 0, or use {IGNORE_INDEX} for samples to ignore"
        raise DataError("D004", f"label {low} at {split} sample {where:,}", key="data", suggestion=hint)
    if high >= num_classes:
        where = _first(labels, high)
        what = f"label {high} at {split} sample {where:,}, but there are {num_classes} classes"
        raise DataError("D004", what, key="data", suggestion=f"Labels run from 0 to {num_classes - 1}")


def _first(labels: Tensor, value: int) -> int:
    return int((labels == value).nonzero()[0, 0])
