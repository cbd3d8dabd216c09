"""Files of columns: CSV, TSV and Parquet, read as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ptfast.core.errors import DataError, did_you_mean, import_extra, name_some, shorten
from ptfast.data.sources.text_files import read_rows


class Rows(NamedTuple):
    """The rows of a file."""

    columns: Mapping[str, Sequence[Any]]
    numbers: Sequence[int]
    """The place of each row in the file, for messages."""
    file: str
    delimiter: str = ","

    def take(self, rows: Sequence[int]) -> Rows:
        columns = {name: [values[row] for row in rows] for name, values in self.columns.items()}
        return self._replace(columns=columns, numbers=[self.numbers[row] for row in rows])

    def check(self, key: str, *names: str) -> None:
        """Raise DataError D005 for a column that `key` names and the file does not have."""
        known = [*self.columns]
        for name in names:
            if name not in known:
                hint = did_you_mean(name, known) or f"It has {name_some(known, 10)}"
                what = f"{self.file} has no such column"
                raise DataError("D005", what, key=key, value=name, suggestion=hint)


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
