"""The target among the columns of a file: classes by name, or numbers to predict."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ptfast.core.errors import DataError, name_some, shorten
from ptfast.core.protocols import DataInfo
from ptfast.data.tables.columns import Rows
from ptfast.data.tables.preparation import present

MOST_NUMBERED_CLASSES = 20
"""A target of whole numbers with more different values is a number to predict."""
Facts = dict[str, Any]
"""Fields of `DataInfo`."""


def read_targets(
    rows: Mapping[str, Rows],
    name: str,
    *,
    key: str = "data.target",
    task: str = "auto",
    known: DataInfo | None = None,
) -> tuple[Facts, dict[str, Tensor]]:
    """Facts about the column `name`, and its values in each split: float32, or classes as int64.

    Args:
        rows: the rows of each split.
        key: the key of the config that names the column.
        task: `auto`, `classification` or `regression`. Text and up to 20 different whole numbers are classes
            by themselves, other numbers are predicted as such.
        known: the data of a trained model, whose classes are taken.

    Raises:
        DataError: D003 to D005, naming the row, for values that are missing or do not fit.
    """
    values = {split: _values(each, name) for split, each in rows.items()}
    numbers = {split: _as_floats(each) for split, each in values.items()}
    train, reason = numbers["train"], ""
    is_number = train is not None
    if known is not None:
        is_number = known.task == "regression"
    elif train is not None and bool((train == train.round()).all()):
        distinct = len(train.unique())
        is_number = task == "regression" or (task != "classification" and distinct > MOST_NUMBERED_CLASSES)
        other = "classification" if is_number else "regression"
        reason = f"{distinct:,} different whole numbers in {name}; task={other} changes that"
    if not is_number:
        names = known.class_names if known is not None else None
        return _classes(rows, values, key, name, names, reason or f"the values of {name} are names")
    targets = dict[str, Tensor]()
    for split, found in numbers.items():
        if found is None or not bool(found.isfinite().all()):
            what = f"{name} is a number in the training rows, and not in all of these"
            raise DataError("D004", what, key=rows[split].file)
        targets[split] = found
    return {"task": "regression", "task_reason": reason or "numbers", "num_classes": 1}, targets


def _classes(
    rows: Mapping[str, Rows],
    values: Mapping[str, Sequence[str]],
    key: str,
    column: str,
    names: tuple[str, ...] | None,
    reason: str,
) -> tuple[Facts, dict[str, Tensor]]:
    if names is None:
        names = tuple(sorted({*values["train"]}))
        with contextlib.suppress(ValueError):
            names = tuple(sorted(names, key=float))
    if len(names) == 1:
        what = f"every row has the same value: {shorten(names[0], 40)}"
        raise DataError("D003", what, key=key, value=column)
    places, targets = {name: place for place, name in enumerate(names)}, dict[str, Tensor]()
    for split, each in values.items():
        for row, name in zip(rows[split].numbers, each, strict=True):
            if name not in places:
                what = f"{column}={shorten(name, 40)} does not occur in the training rows"
                hint = f"Training has {name_some(names, 10)}"
                raise DataError("D004", what, key=f"{rows[split].file}:{row}", suggestion=hint)
        targets[split] = torch.tensor([places[name] for name in each])
    facts = {"task": "classification", "task_reason": reason}
    return {**facts, "num_classes": len(names), "class_names": names}, targets


def _values(rows: Rows, name: str) -> list[str]:
    """The target of each row, as text; D004 for a row without one."""
    values = [present(value) for value in rows.columns[name]]
    for row, value in zip(rows.numbers, values, strict=True):
        if value is None:
            raise DataError("D004", f"has no {name}", key=f"{rows.file}:{row}", suggestion="Leave it out")
    whole = (isinstance(value, float) and value.is_integer() for value in values)
    return [f"{value:.0f}" if is_whole else str(value) for value, is_whole in zip(values, whole, strict=True)]


def _as_floats(values: Sequence[str]) -> Tensor | None:
    """Values as float32, or None unless all are numbers."""
    try:
        return torch.tensor([float(value) for value in values], dtype=torch.float32)
    except ValueError:
        return None
