"""Files of columns: CSV, TSV, JSON lines and Parquet, read as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ptfast.core.errors import DataError, did_you_mean, name_some
from ptfast.data.sources.text_files import read_rows
from ptfast.data.tables.records import SUFFIXES, read_records


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
    """The columns of a CSV, JSON-lines or Parquet file.

    Raises:
        DataError: D001 without a file, D002 without rows, D005 if it cannot be read or names a column twice.
        MachineError: E004 for Parquet without the extra `parquet`.
    """
    path, delimiter = path.expanduser(), ","
    if path.suffix.lower() in SUFFIXES:
        names, rows = read_records(path, key)
    else:
        ((_, first), *rows), delimiter = read_rows(path, key)
        names = [field.strip() for field in first]
        for number, fields in rows:
            if len(fields) != len(names):
                what = f"has {len(fields)} of the {len(names)} columns that the first line names"
                raise DataError("D005", what, key=f"{path}:{number}")
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError("D005", f"names the column {twice or '(empty)'} twice", key=key, value=path)
    if not rows:
        raise DataError("D002", "holds no rows", key=key, value=path)
    columns = {name: [values[place] for _, values in rows] for place, name in enumerate(names)}
    return Rows(columns, [number for number, _ in rows], str(path), delimiter)


def read_splits(paths: Mapping[str, str | None]) -> dict[str, Rows]:
    """The rows of each split that has a file; raises as `read_columns`."""
    files = {split: path for split, path in paths.items() if path is not None}
    keys = {split: "data.path" if split == "train" else f"data.{split}_path" for split in files}
    return {split: read_columns(Path(path), keys[split]) for split, path in files.items()}
