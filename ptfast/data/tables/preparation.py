"""The columns of a table: inputs prepared by a fit to the training rows, and targets."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ptfast.core.errors import DataError, name_some, shorten
from ptfast.core.protocols import DataInfo
from ptfast.data.label_checks import as_floats, number_names
from ptfast.data.tables.columns import Rows

Columns = Mapping[str, Sequence[Any]]
"""The values of each column: text, or the numbers, dates and None of a Parquet file."""

MISSING = {"", "na", "n/a", "#n/a", "nan", "-nan", "null", "none", "<na>"}
"""Text that stands for a missing value, in lower case."""
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")
_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d.*)?")
_EXAMPLES = 3
MOST_CATEGORIES = 10_000
"""Maximum number of values of a column with their own category; rarer values share one."""
_FEW = 20
"""A text column with more distinct values than this, and than half of its rows, identifies rows."""


@dataclass(frozen=True)
class Column:
    """One input column, as fitted to the training rows."""

    name: str
    kind: Literal["number", "date", "category"]
    fill: float = 0.0
    """The number for a missing value: the median of the training rows."""
    flags: bool = False
    """Whether an extra input flags missing values, because some training rows have them."""
    comma: str = ""
    """The meaning of a comma in a number: "" for none, `decimal` or `thousands`."""
    values: tuple[str, ...] = ()
    """The categories 1, 2, ...; an empty one stands for missing values, and 0 for unknown ones."""


class Preparation:
    """Turns rows of a table into vectors: numbers, flags of missing numbers, then category numbers.

    Args:
        columns: the input columns in the order of the table.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self.numbers = [each for each in columns if each.kind != "category"]
        self.flags = [each for each in self.numbers if each.flags]
        self.categories = [each for each in columns if each.kind == "category"]

    @classmethod
    def fit(cls, table: Columns, names: Iterable[str], categorical: Sequence[str]) -> tuple[Any, list[str]]:
        """Fit a preparation to training rows; also return notes on columns that were left out."""
        found, notes = list[Column](), list[str]()
        for name in names:
            values = [present(value) for value in table[name]]
            distinct = {value for value in values if value is not None}
            if len(distinct) < 2 and (len(distinct) == 0 or None not in values):
                notes.append(f"{name} is left out: {'it is constant' if distinct else 'it has no values'}")
                continue
            column = None if name in categorical else _number_column(name, values)
            if column is None:
                counts = Counter("" if value is None else str(value) for value in values)
                if name not in categorical and len(counts) > max(_FEW, len(values) / 2):
                    what = f"{name} is left out: {len(counts):,} different values in {len(values):,} rows"
                    notes.append(f"{what} (data.categorical=[{name}] keeps it)")
                    continue
                kept = sorted(value for value, _ in counts.most_common(MOST_CATEGORIES))
                if len(kept) < len(counts):
                    notes.append(f"{name}: the rarest {len(counts) - len(kept):,} values are one category")
                column = Column(name, "category", values=tuple(kept))
            found.append(column)
        return cls(found), notes

    @classmethod
    def from_facts(cls, facts: Sequence[Mapping[str, Any]]) -> Preparation:
        """Return the preparation that `facts` describe."""
        return cls([Column(**{**each, "values": tuple(each["values"])}) for each in facts])

    def facts(self) -> list[dict[str, Any]]:
        """Return the columns as plain values, for JSON."""
        return [{**asdict(each), "values": [*each.values]} for each in (*self.numbers, *self.categories)]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of categories of each categorical column, the unknown one included."""
        return tuple(len(each.values) + 1 for each in self.categories)

    @property
    def width(self) -> int:
        """Inputs per row."""
        return len(self.numbers) + len(self.flags) + len(self.categories)

    def __call__(self, table: Columns, where: str, rows: Sequence[int]) -> NDArray[np.float32]:
        """Return the vectors of all rows, (rows, width) float32.

        Args:
            table: columns by name; columns that training did not have are ignored.
            where, rows: the file and the number of each row in it, for messages.

        Raises:
            DataError: D005 for a missing column, or a value that is not of its column's kind.
        """
        for each in (*self.numbers, *self.categories):
            if each.name not in table:
                what = f"has no column {each.name}, which the model was trained on"
                raise DataError("D005", what, key=where)
        numbers = {each.name: self._parsed(each, table, where, rows) for each in self.numbers}
        parts = [
            np.where(np.isnan(numbers[each.name]), each.fill, numbers[each.name]) for each in self.numbers
        ]
        parts += [np.isnan(numbers[each.name]) for each in self.flags]
        for each in self.categories:
            known = {value: number for number, value in enumerate(each.values, 1)}
            texts = ("" if (value := present(v)) is None else str(value) for v in table[each.name])
            parts.append(np.fromiter((known.get(text, 0) for text in texts), np.float64, len(rows)))
        return np.stack(parts, 1).astype(np.float32) if parts else np.zeros((len(rows), 0), np.float32)

    def statistics(self, inputs: NDArray[np.float32]) -> dict[str, list[float]]:
        """Return mean and standard deviation of each input; 0 and 1 keep category numbers unchanged."""
        mean, std = np.zeros(self.width), np.ones(self.width)
        numeric = inputs[:, : self.width - len(self.categories)].astype(np.float64)
        mean[: numeric.shape[1]] = numeric.mean(0)
        found = numeric.std(0)
        std[: numeric.shape[1]] = np.where(found > 0, found, 1)
        return {"mean": mean.tolist(), "std": std.tolist()}

    def unknown(self, inputs: NDArray[np.float32], table: Columns) -> str:
        """Describe the categories in `table`, whose vectors are `inputs`, that training rows lack."""
        found, first = list[str](), self.width - len(self.categories)
        for place, each in enumerate(self.categories, first):
            rows = np.flatnonzero(inputs[:, place] == 0)
            if len(rows) and len(each.values) < MOST_CATEGORIES:
                found.append(f"{each.name}={shorten(str(table[each.name][rows[0]]), 24)}")
        return name_some(found, _EXAMPLES) if found else ""

    def _parsed(self, column: Column, table: Columns, where: str, rows: Sequence[int]) -> NDArray[np.float64]:
        values = [present(value) for value in table[column.name]]
        read = _dates if column.kind == "date" else partial(_numbers, comma=column.comma)
        if (numbers := read(values)) is None:
            row, value = next(pair for pair in zip(rows, values, strict=True) if read([pair[1]]) is None)
            what = f"{column.name}={shorten(str(value), 40)} is no {column.kind}, as in training"
            raise DataError("D005", what, key=f"{where}:{row}")
        if (infinite := np.flatnonzero(np.isinf(numbers))).size:
            what = f"{column.name} is infinite"
            raise DataError("D005", what, key=f"{where}:{rows[int(infinite[0])]}")
        return numbers


def present(value: Any) -> Any:
    """Return a value of a table, None if it is missing."""
    if value is None or (isinstance(value, float) and value != value):
        return None
    if isinstance(value, str):
        value = value.strip()
        return None if value.lower() in MISSING else value
    return value


def _number_column(name: str, values: Sequence[Any]) -> Column | None:
    """Return the column if all of its values are numbers or dates, else None.

    Raises:
        DataError: D005 for numbers such as 1,234, which may be thousands or decimals.
    """
    missing = None in values
    present = [value for value in values if value is not None]
    if (numbers := _numbers(present)) is not None:
        return Column(name, "number", statistics.median(numbers.tolist()), missing)
    if (numbers := _dates(present)) is not None:
        return Column(name, "date", statistics.median(numbers.tolist()), missing)
    with_comma = [value for value in present if isinstance(value, str) and "," in value]
    meanings = ("thousands", "decimal") if with_comma else ()
    found = {comma: numbers for comma in meanings if (numbers := _numbers(present, comma)) is not None}
    if len(found) > 1:
        what = f"column {name} contains numbers such as {with_comma[0]}, whose comma may mean two things"
        hint = "Write them without a thousands separator and with a decimal point"
        raise DataError("D005", what, key="data.path", suggestion=hint)
    for comma, numbers in found.items():
        return Column(name, "number", statistics.median(numbers.tolist()), missing, comma)
    return None


def _numbers(values: Sequence[Any], comma: str = "") -> NDArray[np.float64] | None:
    """Return values as numbers, NaN for None; None if any is not a number."""
    if comma:
        with_comma = (value for value in values if isinstance(value, str) and "," in value)
        if comma == "thousands" and not all(map(_THOUSANDS.fullmatch, with_comma)):
            return None
        by = "" if comma == "thousands" else "."
        values = [value.replace(",", by) if isinstance(value, str) else value for value in values]
    try:
        return np.array([np.nan if value is None else float(value) for value in values], np.float64)
    except (TypeError, ValueError):
        return None


def _dates(values: Sequence[Any]) -> NDArray[np.float64] | None:
    """Return ISO dates as days since 1970, NaN for None; None if any value is not a date."""
    texts = ["NaT" if value is None else str(value) for value in values]
    if not all(text == "NaT" or _DATE.fullmatch(text) for text in texts):
        return None
    try:
        stamps = np.array([text.replace(" ", "T") for text in texts], "datetime64[s]")
    except ValueError:
        return None
    days = stamps.astype(np.float64) / 86_400
    return np.where(np.isnat(stamps), np.nan, days)


MOST_NUMBERED_CLASSES = 20
"""A target of whole numbers with more distinct values than this is a regression target."""
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
    """Return facts about the column `name`, and its values in each split: float32, or int64 for classes.

    Args:
        rows: the rows of each split.
        key: the key of the config that names the column.
        task: `auto`, `classification` or `regression`. With `auto`, text and up to 20 distinct whole numbers
            are classes; other numbers are regression targets.
        known: the data of a trained model, whose classes are used.

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
    """Return the target of each row, as text; raise D004 for a row without one."""
    values = [present(value) for value in rows.columns[name]]
    for row, value in zip(rows.numbers, values, strict=True):
        if value is None:
            raise DataError("D004", f"has no {name}", key=f"{rows.file}:{row}", suggestion="Leave it out")
    whole = (isinstance(value, float) and value.is_integer() for value in values)
    return [f"{value:.0f}" if is_whole else str(value) for value, is_whole in zip(values, whole, strict=True)]
