"""Records of named fields: JSON lines and Parquet files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ptfast.core.errors import DataError, import_extra, shorten

JSON_SUFFIXES, PARQUET_SUFFIXES = (".jsonl", ".ndjson"), (".parquet", ".pq")
SUFFIXES = (*JSON_SUFFIXES, *PARQUET_SUFFIXES)


def read_records(path: Path, key: str = "data.path") -> tuple[list[str], list[tuple[int, list[Any]]]]:
    """The fields' names, and the number and the values of each record, with None for absent ones.

    Raises:
        DataError: D001 without a file, D002 without records, D005 if it cannot be read.
        MachineError: E004 for Parquet without the extra `parquet`.
    """
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "no such file"
        raise DataError("D001", what, key=key, value=path)
    is_parquet = path.suffix.lower() in PARQUET_SUFFIXES
    names, records = _parquet(path, key) if is_parquet else _json_lines(path, key)
    if not records:
        raise DataError("D002", "holds no records", key=key, value=path)
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
    names, objects = dict[str, None](), list[tuple[int, dict[str, Any]]]()
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    objects.append((number, _object(path, number, line)))
                    names.update(dict.fromkeys(objects[-1][1]))
    except OSError as error:
        raise DataError("D001", f"cannot be read: {error.strerror}", key=key, value=path) from None
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 text (byte {error.start:,})"
        raise DataError("D005", what, key=key, value=path) from None
    return [*names], [(number, [each.get(name) for name in names]) for number, each in objects]


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
    """A value as a field of text, empty where it is absent; None for lists and objects."""
    if value is None:
        return ""
    return str(value) if isinstance(value, (str, bool, int, float)) else None
