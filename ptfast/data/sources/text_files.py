"""Labeled texts in TSV, CSV and record files, with or without a header line."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ptfast.core.errors import DataError, shorten
from ptfast.data.tables.columns import RECORDS, TAB, read_lines, read_rows

SUFFIXES = (".tsv", ".csv", *RECORDS)
"""Suffixes of files of labeled texts."""
LABELS = {"label", "labels", "class", "target", "category", "sentiment", "gold_label"}
_TEXTS = {"text", "sentence", "review", "content", "comment", "document", "question", "tweet", "phrase"}
_NUMBERS = {"id", "idx", "index", "guid", ""}
_NAME_WORDS = 3
"""Maximum number of words in a column's name."""
_SHORT = 24
_FEW = 10
"""In files of up to this many lines, every line may have a different label."""


class Table(NamedTuple):
    """The texts of a file and their labels."""

    texts: list[str]
    labels: list[str] | None
    """None if the header names no label."""
    columns: str
    """The columns read, for the panel: all if none is the label, empty without a header."""
    text_names: list[str]
    """Names of the text columns."""


def read_table(path: Path, text: Sequence[str] = (), label: str | None = None) -> Table:
    """Return the texts and labels of a file; empty lines are skipped.

    Without a header, the label is the last column and the text is everything before it. A header may name the
    label `label`, `class` and the like, and the text `text`, `sentence` and the like; otherwise the text is
    all other columns except row numbers. The first line is a header if, in the label's column, it alone has
    such a name, or it alone is not a number.

    Args:
        path: `.csv`, with commas, semicolons or tabs and quotes; other text files have tabs, and their quotes
            are part of the text.
        text, label: names of columns in the header; found automatically if not given.
    """
    rows, delimiter = read_rows(path)
    header = _header(path, [fields for _, fields in rows], text, label)
    if path.suffix.lower() in RECORDS:
        header = tuple(rows[0][1])
    place, texts, guessed, columns, text_names = -1, list[int](), True, "", list[str]()
    if header is not None:
        place, texts, guessed = _columns(path, header, text, label)
        text_names, columns = [header[each] for each in texts], ", ".join(header)
        if place is not None:
            columns = f"text from {' and '.join(text_names)}, label from {header[place]}"
    else:
        _check_no_table(path, rows)
    table = Table([], [] if place is not None else None, columns, text_names)
    for number, fields in rows[header is not None :]:
        what = None
        used = [*texts, place] if header is not None and place is not None else texts
        nested = next((each for each in used if each < len(fields) and fields[each] is None), None)
        if header is not None and len(fields) != len(header):
            what = f"has {len(fields)} of the {len(header)} columns that the first line names"
        elif header is not None and nested is not None:
            what = f"{header[nested]} is a list or an object, where text is expected"
        elif place is not None and (len(fields) < 2 or not fields[place].strip()):
            what = f"has no label: expected text{'<TAB>' if delimiter == TAB else delimiter}label"
        if what is not None:
            raise DataError("D005", what, key=f"{path}:{number}")
        # Without a header, a text may contain the delimiter.
        parts = delimiter.join(fields[:-1]) if header is None else " ".join(fields[each] for each in texts)
        table.texts.append(parts)
        if table.labels is not None and place is not None:
            table.labels.append(fields[place].strip())
    kinds = len(set(table.labels or ()))
    if guessed and (kinds > len(set(table.texts)) or (len(rows) > _FEW and 2 * kinds > len(rows))):
        raise _unclear(path, rows[0][1])
    return table


def read_texts(path: Path, columns: Sequence[str], key: str) -> Iterator[tuple[int, str]]:
    """Yield the number and text of each line; the text is that of `columns` if the header names them."""
    if columns and path.suffix.lower() in SUFFIXES:
        (_, first), *rows = read_rows(path)[0]
        names = [field.strip() for field in first]
        if {*columns} <= {*names}:
            places = [names.index(name) for name in columns]
            for number, fields in rows:
                yield number, " ".join(fields[place] for place in places if place < len(fields))
            return
    yield from read_lines(path, key)


def _check_no_table(path: Path, rows: Sequence[tuple[int, list[str]]]) -> None:
    """Raise DataError D005 if most lines have the same number of fields, and more than two."""
    counts = Counter(len(fields) for _, fields in rows)
    usual, times = counts.most_common(1)[0]
    if usual <= 2 or len(rows) < 2 or 2 * times <= len(rows):
        return
    if len(counts) == 1:
        raise _unclear(path, rows[0][1])
    number, fields = next(row for row in rows if len(row[1]) != usual)
    what = f"has {len(fields)} field{'s' * (len(fields) > 1)}, and most lines have {usual}"
    hint = "Give all lines the same fields, and begin with a line that names them"
    raise DataError("D005", what, key=f"{path}:{number}", suggestion=hint)


def _header(
    path: Path, rows: Sequence[list[str]], text: Sequence[str], label: str | None
) -> tuple[str, ...] | None:
    """Return the first row if it names columns, or the user names some; raise D005 if that is unclear."""
    first, others = [field.strip() for field in rows[0]], rows[1:]
    if missing := [name for name in text if name not in first]:
        what = f"no such column in the first line, which is {_shown(first)}"
        raise DataError("D005", what, key="data.text", value=missing[0])
    if text or label:
        return tuple(first)
    # pandas writes row numbers under an empty name.
    if len(first) < 2 or not others or not _are_names(first[not first[0] :]):
        return None
    names = [name.lower() for name in first]
    if set(names) <= LABELS | _TEXTS | _NUMBERS:
        return tuple(first)
    named = [place for place, name in enumerate(names) if name in LABELS]
    place = named[0] if named else len(names) - 1
    labels = {fields[place].strip() for fields in others if place < len(fields)}
    if first[place] in labels:
        return None
    if named or (len(others) > 1 and all(map(_is_number, labels))):
        return tuple(first)
    if 2 * len(labels) <= len(others):
        what = f"may name columns or be a sample: no other line has its label {_shown([first[place]])}"
        hint = "Set data.text and data.label if it names columns; else begin with a sample of another class"
        raise DataError("D005", what, key=f"{path}:1", suggestion=hint)
    return None


def _columns(
    path: Path, header: tuple[str, ...], text: Sequence[str], label: str | None
) -> tuple[int | None, list[int], bool]:
    """Return the label's column (or None), the text's columns, and whether the label is only a guess."""
    names = [name.lower() for name in header]
    texts = [header.index(name) for name in text]
    rest = [place for place in range(len(names)) if names[place] not in _NUMBERS and place not in texts]
    labels = [place for place in rest if names[place] in LABELS]
    if label is not None:
        labels = [header.index(label)] if label in header else []
    guessed = not labels and label is None
    if guessed and len(header) == 2:
        # One of two columns is the text; the last is the label unless it is called text.
        labels = [place for place in rest if names[place] not in _TEXTS][-1:]
    if not labels:
        return None, texts, False
    rest = [place for place in rest if place not in labels]
    texts = texts or [place for place in rest if names[place] in _TEXTS] or rest
    if len(labels) > 1 or (len(texts) != 1 and not text):
        raise _unclear(path, header)
    return labels[0], texts, guessed


def _unclear(path: Path, first: Sequence[str]) -> DataError:
    what = f"which of its {len(first)} columns contain the text and the label is unclear"
    hint = "Begin it with a line that names them, such as title,text,label"
    if _are_names(first):
        hint = f"Set data.text (a name, or [a,b]) and data.label to names in its first line ({_shown(first)})"
    return DataError("D005", what, key=f"{path}:1", suggestion=hint)


def _shown(fields: Sequence[str]) -> str:
    return ", ".join(shorten(field, _SHORT) for field in fields)


def _are_names(fields: Sequence[str]) -> bool:
    """Return True if all of `fields` may be column names: a few words, and not a number."""
    return all(0 < len(field.split()) <= _NAME_WORDS and not _is_number(field) for field in fields)


def _is_number(field: str) -> bool:
    with contextlib.suppress(ValueError):
        float(field)
        return True
    return False
