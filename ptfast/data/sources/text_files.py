"""Files of text: as a whole, and labelled texts in TSV and CSV, with or without a line that names columns."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ptfast.core.errors import DataError

SUFFIXES = (".tsv", ".csv")
"""Of files of labelled texts."""
_LABELS = {"label", "labels", "class", "target", "category", "sentiment", "gold_label"}
_TEXTS = {"text", "sentence", "review", "content", "comment", "document", "question", "tweet", "phrase"}
_NUMBERS = {"id", "idx", "index", "guid"}
_NAME_WORDS = 3
"""Words of a column's name, at most."""
_LONGEST_FIELD = 2**31 - 1


class Table(NamedTuple):
    """The texts of a file and their labels."""

    texts: list[str]
    labels: list[str] | None
    """None where the first line names columns, and no label among them."""
    header: tuple[str, ...] | None
    """The columns that the first line names; None where it is a sample like all others."""


def read_text(path: Path, key: str = "data.path") -> str:
    """The text of a UTF-8 file that holds some.

    Raises:
        DataError: D001 if there is no such file, D002 if it is empty, D005 if it is not UTF-8.
    """
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "no such file"
        raise DataError("D001", what, key=key, value=path)
    try:
        # Line ends stay as they are: what is modelled is the file.
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError("D001", f"cannot be read: {error.strerror}", key=key, value=path) from None
    except UnicodeDecodeError as error:
        what = f"is no UTF-8 text (byte {error.start:,})"
        hint = "Convert it with iconv -t utf-8"
        raise DataError("D005", what, key=key, value=path, suggestion=hint) from None
    if not text.strip():
        raise DataError("D002", "holds no text", key=key, value=path)
    return text


def read_table(path: Path) -> Table:
    """Texts and labels of a file; empty lines are skipped.

    The label is the last column, and the text all before it. A first line that names columns is no sample,
    and may name others: what is called `label`, `class` and the like, and what is called `text`, `sentence`
    and the like, or all besides the label that is no running number. It is known by the place of the label,
    where it has what no other line has: a name of that kind, or no number where all others are numbers.

    Args:
        path: `.csv`, with commas and quotes; anything else has tabs, and quotes that are part of a text.

    Raises:
        DataError: D001, D002 or D005, naming the line.
    """
    is_csv = path.suffix.lower() == ".csv"
    rows = list(_csv_rows(path) if is_csv else _tsv_rows(path))
    header = _header([fields for _, fields in rows])
    label, texts = _columns(header) if header is not None else (-1, None)
    table = Table([], [] if label is not None else None, header)
    for number, fields in rows[header is not None :]:
        what = None
        if texts is not None and header is not None and len(fields) != len(header):
            what = f"has {len(fields)} of the {len(header)} columns that the first line names"
        elif label is not None and (len(fields) < 2 or not fields[label].strip()):
            what = f"has no label: expected text{',' if is_csv else '<TAB>'}label"
        if what is not None:
            raise DataError("D005", what, key=f"{path}:{number}")
        if texts is not None:
            parts = [fields[place] for place in texts]
        else:
            # A text may have tabs itself.
            parts = fields[1:] if label == 0 else fields[:-1]
        table.texts.append(("," if is_csv else "\t").join(parts))
        if table.labels is not None and label is not None:
            table.labels.append(fields[label].strip())
    return table


def _tsv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            yield number, line.rstrip("\r").split("\t")


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    before = csv.field_size_limit(_LONGEST_FIELD)
    number = 1
    try:
        for fields in reader:
            if any(field.strip() for field in fields):
                yield number, fields
            # Texts in quotes may have several lines: a row is named by its first.
            number = reader.line_num + 1
    except csv.Error as error:
        raise DataError("D005", f"is no CSV: {error}", key=f"{path}:{number}") from None
    finally:
        csv.field_size_limit(before)


def _header(rows: Sequence[list[str]]) -> tuple[str, ...] | None:
    """The first row, if it names columns."""
    first, others = [field.strip() for field in rows[0]], rows[1:]
    if len(first) < 2 or not others or any(_is_number(name) or not _is_name(name) for name in first):
        return None
    names = [name.lower() for name in first]
    if set(names) <= _LABELS | _TEXTS | _NUMBERS:
        return tuple(first)
    named = _place(names, _LABELS)
    place = len(names) - 1 if named is None else named
    labels = {fields[place].strip() for fields in others if place < len(fields)}
    numbers = len(others) > 1 and all(map(_is_number, labels))
    return tuple(first) if first[place] not in labels and (named is not None or numbers) else None


def _columns(header: tuple[str, ...]) -> tuple[int | None, list[int] | None]:
    """The column of the label, None for none, and those of the text, None for all besides the label."""
    names = [name.lower() for name in header]
    text, label = _place(names, _TEXTS), _place(names, _LABELS)
    if label is None and text != len(names) - 1:
        label = len(names) - 1
    if len(names) == 2 and label is not None:
        return label, None
    others = [place for place in range(len(names)) if place != label and names[place] not in _NUMBERS]
    return label, others if text is None else [text]


def _place(names: list[str], known: set[str]) -> int | None:
    return next((place for place, name in enumerate(names) if name in known), None)


def _is_name(field: str) -> bool:
    return bool(field) and len(field.split()) <= _NAME_WORDS


def _is_number(field: str) -> bool:
    with contextlib.suppress(ValueError):
        float(field)
        return True
    return False
