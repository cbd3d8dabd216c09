"""Tables: a CSV or Parquet file of numbers and categories, one column of which is the target."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ptfast.core.durations import Duration
from ptfast.core.errors import DataError, did_you_mean, import_extra, name_some, shorten
from ptfast.core.protocols import DataInfo
from ptfast.data.dataset import ReadsAsKnown, Splits
from ptfast.data.decoding.table_columns import MISSING, Columns, Preparation, present
from ptfast.data.map_source import TensorSource
from ptfast.data.sampling.sampler import split_indices
from ptfast.data.sources.text_files import read_rows

_MOST_NUMBERED_CLASSES = 20
"""A target of whole numbers with more different values is a number to predict."""


class Rows(NamedTuple):
    """The rows of a file."""

    columns: Columns
    numbers: Sequence[int]
    """The place of each row in the file, for messages."""
    file: str
    delimiter: str = ","

    def take(self, rows: Sequence[int]) -> Rows:
        columns = {name: [values[row] for row in rows] for name, values in self.columns.items()}
        return self._replace(columns=columns, numbers=[self.numbers[row] for row in rows])


class Table(ReadsAsKnown):
    """Rows of a CSV or Parquet file: numbers, dates and categories, and a target to predict.

    A column is numeric if all its values are numbers, a date if all are ISO dates (then days since 1970), and
    categorical otherwise. Missing numbers become the median of the training rows, with a further input that
    says so. Each category gets a number; the model sees those last, and `model=mlp` embeds them. All of it
    is fitted to the training rows, saved with the run and applied by `predict`.

    Args:
        path: `.csv` or `.tsv` whose first line names the columns, or `.parquet`.
        target: the column to predict. Text and up to 20 different whole numbers are classes, other numbers
            are predicted as such; `task=classification` or `task=regression` decides otherwise.
        val_path, test_path: files of the same columns; without the first, `data.val` of the rows is held out.
        ignore: columns to leave out.
        categorical: columns whose numbers are names, such as postal codes.

    Raises:
        DataError: D001 to D005 by `load`, naming file, row and column.
    """

    name = "table"

    def __init__(
        self,
        path: str,
        target: str,
        val_path: str | None = None,
        test_path: str | None = None,
        ignore: Sequence[str] = (),
        categorical: Sequence[str] = (),
    ) -> None:
        self.paths = {"train": path, "val": val_path, "test": test_path}
        self.target, self.ignore, self.categorical = target, ignore, categorical

    def load(self, *, val: Duration, seed: int) -> Splits:
        rows = {
            split: read_columns(Path(path), f"data.{split}_path".replace("train_", ""))
            for split, path in self.paths.items()
            if path is not None
        }
        self._check_columns(rows["train"])
        if "val" not in rows and self.known is None and val.value:
            # The preparation must not see the rows that are held out.
            kept, held = split_indices(len(rows["train"].numbers), val, seed)
            rows |= {"train": rows["train"].take(kept.tolist()), "val": rows["train"].take(held.tolist())}
        notes = list[str]()
        if self.known is not None:
            preparation = Preparation.from_facts(self.known.extra["table"]["columns"])
        else:
            names = [n for n in rows["train"].columns if n != self.target and n not in self.ignore]
            preparation, notes = Preparation.fit(rows["train"].columns, names, self.categorical)
            if not preparation.width:
                what = (
                    f"no column besides {self.target} tells rows apart: {'; '.join(notes) or 'none is left'}"
                )
                raise DataError("D005", what, key="data.path", value=self.paths["train"])
        inputs = {split: preparation(each.columns, each.file, each.numbers) for split, each in rows.items()}
        for split, each in rows.items():
            if split != "train" and (unknown := preparation.unknown(inputs[split], each.columns)):
                notes.append(f"{split} has categories that training does not have: {unknown}")
        info, targets = self._targets(rows)
        facts = {
            "columns": preparation.facts(),
            "missing": sorted(MISSING),
            "delimiter": rows["train"].delimiter,
            "target": self.target,
        }
        info = DataInfo(
            kind="features",
            input_shape=(preparation.width,),
            categories=preparation.sizes or None,
            extra={"table": facts, "normalize": preparation.statistics(inputs["train"])},
            **info,
        )
        counts = f"{len(preparation.numbers)} numeric and {len(preparation.categories)} categorical columns"
        sources = {split: TensorSource(torch.from_numpy(inputs[split]), targets[split]) for split in rows}
        return Splits.of(info, sources, "; ".join([counts, *notes]))

    def _check_columns(self, rows: Rows) -> None:
        known = [*rows.columns]
        asked = {
            "data.target": [self.target],
            "data.ignore": self.ignore,
            "data.categorical": self.categorical,
        }
        for key, names in asked.items():
            for name in names:
                if name not in known:
                    hint = did_you_mean(name, known) or f"It has {name_some(known, 10)}"
                    what = f"{rows.file} has no such column"
                    raise DataError("D005", what, key=key, value=name, suggestion=hint)

    def _targets(self, rows: dict[str, Rows]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Facts about the target, and its values in each split: float32, or classes as int64."""
        values = {split: self._present(each) for split, each in rows.items()}
        numbers = {split: _as_floats(each) for split, each in values.items()}
        train, reason = numbers["train"], ""
        is_number = train is not None
        if self.known is not None:
            is_number = self.known.task == "regression"
        elif train is not None and bool((train == train.round()).all()):
            distinct = len(train.unique())
            few = distinct <= _MOST_NUMBERED_CLASSES
            is_number = self.task == "regression" or (self.task != "classification" and not few)
            other = "classification" if is_number else "regression"
            reason = f"{distinct:,} different whole numbers in {self.target}; task={other} changes that"
        if is_number:
            targets = {split: self._checked(each, rows[split]) for split, each in numbers.items()}
            train = targets["train"].double()
            scale = (float(train.mean()), float(train.std(correction=0)) or 1.0)
            if not np.isfinite(scale).all():
                raise DataError("D004", "holds infinite numbers", key="data.target", value=self.target)
            facts = {"task": "regression", "task_reason": reason or "numbers", "num_classes": 1}
            return {**facts, "target_scale": scale}, targets
        return self._classes(rows, values, reason or f"the values of {self.target} are names")

    def _classes(
        self, rows: dict[str, Rows], values: dict[str, list[str]], reason: str
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        names = self.known.class_names if self.known is not None else None
        if names is None:
            names = tuple(sorted({*values["train"]}))
            with contextlib.suppress(ValueError):
                names = tuple(sorted(names, key=float))
        if len(names) == 1:
            what = f"every row has the same value: {shorten(names[0], 40)}"
            raise DataError("D003", what, key="data.target", value=self.target)
        places, targets = {name: place for place, name in enumerate(names)}, dict[str, Tensor]()
        for split, each in values.items():
            for row, name in zip(rows[split].numbers, each, strict=True):
                if name not in places:
                    what = f"{self.target}={shorten(name, 40)} does not occur in the training rows"
                    raise DataError(
                        "D004",
                        what,
                        key=f"{rows[split].file}:{row}",
                        suggestion=f"Training has {name_some(names, 10)}",
                    )
            targets[split] = torch.tensor([places[name] for name in each])
        facts = {"task": "classification", "task_reason": reason}
        return {**facts, "num_classes": len(names), "class_names": names}, targets

    def _present(self, rows: Rows) -> list[str]:
        """The target of each row, as text; D004 for a row without one."""
        if self.target not in rows.columns:
            what = f"{rows.file} has no column {self.target}"
            raise DataError("D005", what, key="data.target", value=self.target)
        values = [present(value) for value in rows.columns[self.target]]
        for row, value in zip(rows.numbers, values, strict=True):
            if value is None:
                hint = "Leave such rows out"
                raise DataError("D004", f"has no {self.target}", key=f"{rows.file}:{row}", suggestion=hint)
        return [
            f"{value:g}" if isinstance(value, float) and value.is_integer() else str(value)
            for value in values
        ]

    def _checked(self, targets: Tensor | None, rows: Rows) -> Tensor:
        if targets is None:
            what = f"{self.target} is a number in the training rows, and not in all of these"
            raise DataError("D004", what, key=rows.file)
        return targets


def _as_floats(values: Sequence[str]) -> Tensor | None:
    """Values as float32, or None unless all are numbers."""
    try:
        return torch.tensor([float(value) for value in values], dtype=torch.float32)
    except ValueError:
        return None


def read_columns(path: Path, key: str = "data.path") -> Rows:
    """The columns of a CSV or Parquet file.

    Raises:
        DataError: D001 without a file, D002 without rows, D005 if it cannot be read or names a column twice.
        MachineError: E004 for Parquet without the extra `parquet`.
    """
    path, delimiter = path.expanduser(), ","
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "no such file"
        raise DataError("D001", what, key=key, value=path)
    if path.suffix.lower() in (".parquet", ".pq"):
        parquet = import_extra("pyarrow.parquet", "parquet", key, path)
        try:
            table = parquet.read_table(path)
        except (OSError, ValueError) as error:
            what = f"is not a readable Parquet file: {shorten(error, 120)}"
            raise DataError("D005", what, key=key, value=path) from None
        names, numbers = table.column_names, range(table.num_rows)
        columns = {name: table.column(place).to_pylist() for place, name in enumerate(names)}
    else:
        lines, delimiter = read_rows(path)
        (_, first), *rest = lines
        names, numbers = [field.strip() for field in first], [number for number, _ in rest]
        for number, fields in rest:
            if len(fields) != len(names):
                what = f"has {len(fields)} of the {len(names)} columns that the first line names"
                raise DataError("D005", what, key=f"{path}:{number}")
        columns = {name: [fields[place] for _, fields in rest] for place, name in enumerate(names)}
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError("D005", f"names the column {twice or '(empty)'} twice", key=key, value=path)
    if not len(numbers):
        raise DataError("D002", "holds no rows", key=key, value=path)
    return Rows(columns, numbers, str(path), delimiter)
