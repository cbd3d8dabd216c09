"""The target among the columns of a file: classes by name, or numbers to predict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ptfast.core.errors import DataError, shorten
from ptfast.core.protocols import DataInfo
from ptfast.data.label_checks import as_floats, number_names
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
    numbers = {split: as_floats(each) for split, each in values.items()}
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
        facts, targets = number_names(
            values,
            known.class_names if known is not None else None,
            key=key,
            value=name,
            place=lambda split, row: f"{rows[split].file}:{rows[split].numbers[row]}",
        )
        return {**facts, "task_reason": reason or f"the values of {name} are names"}, targets
    targets = dict[str, Tensor]()
    for split, found in numbers.items():
        if found is None or not bool(found.isfinite().all()):
            read = ((row, as_floats([text])) for row, text in enumerate(values[split]))
            wrong = next(row for row, number in read if number is None or not number.isfinite())
            what = (
                f"{name} is a number in the training rows, and here it is {shorten(values[split][wrong], 40)}"
            )
            raise DataError("D004", what, key=f"{rows[split].file}:{rows[split].numbers[wrong]}")
        targets[split] = found
    return {"task": "regression", "task_reason": reason or "numbers", "num_classes": 1}, targets


def _values(rows: Rows, name: str) -> list[str]:
    """The target of each row, as text; D004 for a row without one."""
    values = [present(value) for value in rows.columns[name]]
    for row, value in zip(rows.numbers, values, strict=True):
        if value is None:
            raise DataError("D004", f"has no {name}", key=f"{rows.file}:{row}", suggestion="Leave it out")
    whole = (isinstance(value, float) and value.is_integer() for value in values)
    return [f"{value:.0f}" if is_whole else str(value) for value, is_whole in zip(values, whole, strict=True)]
