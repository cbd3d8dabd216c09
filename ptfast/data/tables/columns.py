"""Text files and tables (CSV, TSV, JSON lines, Parquet), read into memory."""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ptfast.core.errors import DataError, did_you_mean, import_extra, name_some, shorten

PARQUET = (".parquet", ".pq")
RECORDS = (".jsonl", ".ndjson", *PARQUET)
"""Suffixes of files of records with named fields."""
_LONGEST_FIELD = 2**31 - 1
TAB = "\t"
_DELIMITERS = (",", ";", TAB)
"""Delimiters of a CSV file; if several fit equally, the first is used."""
_FIRST_LINES = 50
"""Lines of a CSV file that are read to detect its delimiter."""


def check_file(path: Path, key: str) -> None:
    """Raise DataError D001 unless `path` is a file."""
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "no such file"
        raise DataError("D001", what, key=key, value=path)


def read_text(path: Path, key: str = "data.path") -> str:
    """Return the text of a UTF-8 file; lines that end in a bare carriage return get newlines.

    Raises:
        DataError: D001 if there is no such file, D002 if it is empty, D005 if it is not UTF-8.
    """
    check_file(path, key)
    try:
        # Keep line ends as they are: the model is trained on the file.
        content = path.read_bytes()
        text, wrong = content.decode("utf-8-sig"), content[:2].find(0)
    except OSError as error:
        raise DataError("D001", f"cannot be read: {error.strerror}", key=key, value=path) from None
    except UnicodeDecodeError as error:
        content, text, wrong = error.object, "", error.start
    if wrong >= 0:
        # UTF-16 starts with a byte-order mark, or has a zero byte in a Latin letter.
        starts = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
        by_zero = {0: "utf-16be", 1: "utf-16le", -1: "latin1"}[content[:2].find(0)]
        what = f"is not UTF-8 text (byte {wrong:,})"
        hint = f"Convert it, for example with iconv -f {starts.get(content[:2], by_zero)} -t utf-8"
        raise DataError("D005", what, key=key, value=path, suggestion=hint)
    if "\n" not in text:
        text = text.replace("\r", "\n")
    if not text.strip():
        raise DataError("D002", "contains no text", key=key, value=path)
    return text


def read_records(path: Path, key: str = "data.path") -> tuple[list[str], list[tuple[int, list[Any]]]]:
    """Return the names of fields, and the number and values of each record, None for absent values.

    Raises:
        DataError: D001 without a file, D002 without records, D005 if it cannot be read.
        MachineError: E004 for Parquet without the extra `parquet`.
    """
    check_file(path, key)
    is_parquet = path.suffix.lower() in PARQUET
    names, records = _parquet(path, key) if is_parquet else _json_lines(path, key)
    if not records:
        raise DataError("D002", "contains no records", key=key, value=path)
    return names, records


def _parquet(path: Path, key: str) -> tuple[list[str], list[tuple[int, list[Any]]]]:
    parquet = import_extra("pyarrow.parquet", "parquet", key, path)
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:
        what = f"is not a readable Parquet file: {shorten(error, 120)}"
        raise DataError("D005", what, key=key, value=path) from None
    columns = [column.to_pylist() for column in table.columns]
    return table.column_names, [(place, list(row)) for place, row in enumerate(zip(*columns, strict=True))]


def _json_lines(path: Path, key: str) -> tuple[list[str], list[tuple[int, list[Any]]]]:
    lines = enumerate(read_text(path, key).split("\n"), 1)
    objects = [(number, _object(path, number, line)) for number, line in lines if line.strip()]
    names = list(dict.fromkeys(name for _, each in objects for name in each))
    return names, [(number, [each.get(name) for name in names]) for number, each in objects]


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        what = f"is no JSON: {shorten(error, 80)}"
        raise DataError("D005", what, key=f"{path}:{number}") from None
    if not isinstance(found, dict):
        hint = 'Write one object a line, such as {"text": "...", "label": "..."}'
        raise DataError("D005", "is no JSON object", key=f"{path}:{number}", suggestion=hint)
    return found


def as_text(value: Any) -> str | None:
    """Return a value as text, empty if it is absent; None for lists and objects."""
    if value is None:
        return ""
    return str(value) if isinstance(value, (str, bool, int, float)) else None


def read_lines(path: Path, key: str) -> Iterator[tuple[int, str]]:
    """Yield the number and text of each line of a file, without its line end."""
    for number, line in enumerate(read_text(path, key).split("\n"), 1):
        yield number, line.rstrip("\r")


def read_rows(path: Path, key: str = "data.path") -> tuple[list[tuple[int, list[Any]]], str]:
    """Return the number and fields of each non-empty line, and the delimiter.

    JSON lines and Parquet files get a first line that names the fields; lists in them become None.
    """
    if path.suffix.lower() in RECORDS:
        names, rows = read_records(path, key)
        texts = [(number, [as_text(value) for value in row]) for number, row in rows]
        return [(0, names), *texts], TAB
    if path.suffix.lower() != ".csv":
        return [(number, line.split(TAB)) for number, line in read_lines(path, key) if line.strip()], TAB
    text = read_text(path, key)
    delimiter, most = _DELIMITERS[0], 1
    for each in _DELIMITERS:
        with contextlib.suppress(DataError):
            counts = {len(fields) for _, fields in islice(_csv_rows(path, text, each), _FIRST_LINES)}
            # It is the delimiter only if every line has the same number of fields.
            if len(counts) == 1 and max(counts) > most:
                delimiter, most = each, max(counts)
    return list(_csv_rows(path, text, delimiter)), delimiter


def _csv_rows(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    before = csv.field_size_limit(_LONGEST_FIELD)
    number = 1
    try:
        for fields in reader:
            if any(field.strip() for field in fields):
                yield number, fields
            # Quoted texts may span lines: a row is numbered by its first line.
            number = reader.line_num + 1
    except csv.Error as error:
        raise DataError("D005", f"is not a CSV file: {error}", key=f"{path}:{number}") from None
    finally:
        csv.field_size_limit(before)


class Rows(NamedTuple):
    """The rows of a file."""

    columns: Mapping[str, Sequence[Any]]
    numbers: Sequence[int]
    """The position of each row in the file, for messages."""
    file: str
    delimiter: str = ","

    def take(self, rows: Sequence[int]) -> Rows:
        columns = {name: [values[row] for row in rows] for name, values in self.columns.items()}
        return self._replace(columns=columns, numbers=[self.numbers[row] for row in rows])

    def check(self, key: str, *names: str) -> None:
        """Raise DataError D005 if the file lacks a column that `key` names."""
        known = [*self.columns]
        for name in names:
            if name not in known:
                hint = did_you_mean(name, known) or f"It has {name_some(known, 10)}"
                what = f"{self.file} has no such column"
                raise DataError("D005", what, key=key, value=name, suggestion=hint)


def read_columns(path: Path, key: str = "data.path") -> Rows:
    """Read the columns of a CSV, JSON-lines or Parquet file.

    Raises:
        DataError: D001 without a file, D002 without rows, D005 if it cannot be read or names a column twice.
        MachineError: E004 for Parquet without the extra `parquet`.
    """
    path, delimiter = path.expanduser(), ","
    if path.suffix.lower() in RECORDS:
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
        raise DataError("D002", "contains no rows", key=key, value=path)
    columns = {name: [values[place] for _, values in rows] for place, name in enumerate(names)}
    return Rows(columns, [number for number, _ in rows], str(path), delimiter)


def read_splits(paths: Mapping[str, str | None]) -> dict[str, Rows]:
    """Read the rows of each split that has a file; raises as `read_columns` does."""
    files = {split: path for split, path in paths.items() if path is not None}
    keys = {split: "data.path" if split == "train" else f"data.{split}_path" for split in files}
    return {split: read_columns(Path(path), keys[split]) for split, path in files.items()}
