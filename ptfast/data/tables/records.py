"""Text files, and files of records with named fields: JSON lines and Parquet."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

from ptfast.core.errors import DataError, import_extra, shorten

JSON_SUFFIXES, PARQUET_SUFFIXES = (".jsonl", ".ndjson"), (".parquet", ".pq")
SUFFIXES = (*JSON_SUFFIXES, *PARQUET_SUFFIXES)


def check_file(path: Path, key: str) -> None:
    """Raise DataError D001 unless there is such a file."""
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "no such file"
        raise DataError("D001", what, key=key, value=path)


def read_text(path: Path, key: str = "data.path") -> str:
    """The text of a UTF-8 file that holds some; lines that end in a mere carriage return get newlines.

    Raises:
        DataError: D001 if there is no such file, D002 if it is empty, D005 if it is not UTF-8.
    """
    check_file(path, key)
    try:
        # Line ends stay as they are: what is modelled is the file.
        content = path.read_bytes()
        text, wrong = content.decode("utf-8-sig"), content[:2].find(0)
    except OSError as error:
        raise DataError("D001", f"cannot be read: {error.strerror}", key=key, value=path) from None
    except UnicodeDecodeError as error:
        content, text, wrong = error.object, "", error.start
    if wrong >= 0:
        # UTF-16 has a mark or, of a Latin letter, a zero byte.
        starts = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
        by_zero = {0: "utf-16be", 1: "utf-16le", -1: "latin1"}[content[:2].find(0)]
        what = f"is not UTF-8 text (byte {wrong:,})"
        hint = f"Convert it, for example with iconv -f {starts.get(content[:2], by_zero)} -t utf-8"
        raise DataError("D005", what, key=key, value=path, suggestion=hint)
    if "\n" not in text:
        text = text.replace("\r", "\n")
    if not text.strip():
        raise DataError("D002", "holds no text", key=key, value=path)
    return text


def read_records(path: Path, key: str = "data.path") -> tuple[list[str], list[tuple[int, list[Any]]]]:
    """The fields' names, and the number and the values of each record, with None for absent ones.

    Raises:
        DataError: D001 without a file, D002 without records, D005 if it cannot be read.
        MachineError: E004 for Parquet without the extra `parquet`.
    """
    check_file(path, key)
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
    """A value as a field of text, empty where it is absent; None for lists and objects."""
    if value is None:
        return ""
    return str(value) if isinstance(value, (str, bool, int, float)) else None
