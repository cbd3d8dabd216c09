"""Files of labelled texts as programs write them: read as the csv module reads them, or rejected."""

from __future__ import annotations

import csv
import io
import itertools
from pathlib import Path

import pytest

from ptfast.core.durations import Duration
from ptfast.core.errors import DataError
from ptfast.data.sources.text_dataset import TextTsv
from ptfast.data.sources.text_files import read_table, read_texts

ROWS = [
    ("a fine film", "pos"),
    ("bad, long; and dull", "neg"),
    ('he said "no"', "neg"),
    ("größer als alles", "pos"),
    ("two\nlines", "neg"),
    ("  spaces kept  ", "pos"),
]
LINES = [(text.replace("\n", " "), label) for text, label in ROWS]
"""The same without a line end inside of a text, for files without quotes."""
FORMS = list(
    itertools.product(
        ({"delimiter": ","}, {"delimiter": ";"}, {"delimiter": "\t"}),
        ("\n", "\r\n", "\r"),
        ("utf-8", "utf-8-sig"),
        (csv.QUOTE_MINIMAL, csv.QUOTE_ALL),
        ("", "text label", "label text", "id text label", " text label"),
    )
)
"""Delimiter, line ends, encoding, quotes, and the names in the first line."""


def written(rows: list[tuple[str, str]], names: list[str], end: str, quotes: int, delimiter: str) -> str:
    """Rows as the csv module writes them, in the order of `names`, with an empty line at the end."""
    stream = io.StringIO()
    writer = csv.writer(stream, delimiter=delimiter, lineterminator=end, quoting=quotes)  # type: ignore[arg-type]
    if names:
        writer.writerow(names)
    for number, (text, label) in enumerate(rows):
        known = {"text": text.replace("\n", end), "label": label}
        writer.writerow([known.get(name, str(number)) for name in names or known])
    return stream.getvalue() + end


@pytest.mark.parametrize(("dialect", "end", "encoding", "quotes", "names"), FORMS)
def test_csv_files_are_read_as_the_csv_module_reads_them(
    dialect: dict[str, str], end: str, encoding: str, quotes: int, names: str, tmp_path: Path
) -> None:
    path, columns = tmp_path / "a.csv", names.split(" ") if names else []
    path.write_bytes(written(ROWS, columns, end, quotes, **dialect).encode(encoding))
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = [row for row in csv.reader(file, **dialect) if row]  # type: ignore[call-overload]
    names_or_order = rows.pop(0) if names else ["text", "label"]
    place, label = names_or_order.index("text"), names_or_order.index("label")
    table = read_table(path)
    # In a file without newlines a carriage return ends lines, inside of texts as well.
    texts = [row[place].replace("\r", "\n") if end == "\r" else row[place] for row in rows]
    assert table.texts == texts
    assert table.labels == [row[label] for row in rows]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("names", ["", "text\tlabel", "label\ttext", "\ttext\tlabel"])
def test_tsv_files_have_no_quotes(end: str, names: str, tmp_path: Path) -> None:
    path, columns = tmp_path / "a.tsv", names.split("\t") if names else ["text", "label"]
    lines = [names] if names else []
    for number, (text, label) in enumerate(LINES):
        known = {"text": text, "label": label}
        lines.append("\t".join(known.get(name, str(number)) for name in columns))
    path.write_bytes(end.join([*lines, ""]).encode())
    table = read_table(path)
    assert [*zip(table.texts, table.labels or (), strict=True)] == LINES
    assert [text for _, text in read_texts(path, ["text"], "PATH")][: len(LINES)] == (
        [text for text, _ in LINES] if names else [f"{text}\t{label}" for text, label in LINES]
    )


LABELS = {
    "whole numbers": (["1", "0", "2"], "classification", ("0", "1", "2"), [1, 0, 2]),
    "whole numbers of two digits": (["10", "9", "8"], "classification", ("8", "9", "10"), [2, 1, 0]),
    "whole floats": (["1.0", "0.0", "2.0"], "classification", ("0.0", "1.0", "2.0"), [1, 0, 2]),
    "fractions": (["0.5", "-3", "2e1"], "regression", None, [0.5, -3, 20]),
    "booleans": (["True", "False", "True"], "classification", ("False", "True"), [1, 0, 1]),
    "names": (["neg", "pos", "neutral"], "classification", ("neg", "neutral", "pos"), [0, 2, 1]),
    "a name among numbers": (["1", "2", "nan"], "classification", ("1", "2", "nan"), [0, 1, 2]),
}


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_labels_are_classes_or_figures(kind: str, suffix: str, tmp_path: Path) -> None:
    labels, task, names, first = LABELS[kind]
    rows = [(f"word {number % 5}", label) for number, label in enumerate(labels * 6)]
    path = tmp_path / f"a{suffix}"
    path.write_text(
        written(rows, ["text", "label"], "\n", csv.QUOTE_MINIMAL, "," if suffix == ".csv" else "\t")
    )
    splits = TextTsv(path=str(path)).load(val=Duration(0, "percent"), seed=0)
    assert (splits.info.task, splits.info.class_names) == (task, names)
    assert splits.train.targets[:3].tolist() == first  # type: ignore[union-attr]


NUMBERED = "".join(f"{number}.5,{number},3.25,9,{number % 2}\n" for number in range(30))
REJECTED: dict[str, tuple[str, bytes | str, str]] = {
    "bars between the fields": ("a.csv", "one|0\ntwo|1\nthree|0\n", r"a.csv:1: has no label"),
    "a first line of another length": (
        "a.csv",
        "60,2,neg,pos\n" + NUMBERED,
        r"a.csv:1: has 4 fields, and most",
    ),
    "a line of another length": (
        "a.csv",
        NUMBERED + "1,2\n",
        r"a.csv:31: has 2 fields, and most lines have 5",
    ),
    "the same with tabs": ("a.tsv", (NUMBERED + "1,2\n").replace(",", "\t"), r"a.tsv:31: has 2 fields"),
    "several columns": ("a.csv", NUMBERED, r"a.csv:1: which of its 5 columns contain the text and the label"),
    "a short row below names": ("a.csv", "text,label\na,1\nb\n", r"a.csv:3: has 1 of the 2 columns"),
    "a long row below names": ("a.csv", "text,label\na,1\nb,c,0\n", r"a.csv:3: has 3 of the 2 columns"),
    "the same name twice": ("a.csv", "text,label,label\na,1,0\nb,0,1\n", r"a.csv:1: which of its 3 columns"),
    "one column": ("a.csv", "text\na\nb\n", r"a.csv:1: has no label"),
    "a missing label": ("a.csv", "text,label\na,1\nb,\nc,0\n", r"a.csv:3: has no label"),
    "a quote that stays open": ("a.csv", 'text,label\n"a,1\nb,0\n', r"a.csv:2: is not a CSV file"),
    "text behind a quote": ("a.csv", 'text,label\n"a"b,1\n', r"a.csv:2: is not a CSV file"),
    "nothing": ("a.csv", "", r"a.csv: contains no text"),
    "empty lines": ("a.csv", "\n \n\r\n", r"a.csv: contains no text"),
    "captions": (
        "a.csv",
        "text,label\n" + "".join(f"a {n % 3},b {n}\n" for n in range(20)),
        "20 of 20 training",
    ),
    "one class": ("a.csv", "text,label\na,1\nb,1\n", "every training label is 1"),
    "UTF-16": ("a.csv", "text,label\na,1\n".encode("utf-16"), "iconv -f utf-16 -t utf-8"),
    "UTF-16, big end first": (
        "a.csv",
        b"\xfe\xff" + "text,label\na,1\n".encode("utf-16-be"),
        "iconv -f utf-16 ",
    ),
    "UTF-16 without a mark": (
        "a.tsv",
        "text\tlabel\na\t1\n".encode("utf-16-le"),
        "iconv -f utf-16le -t utf-8",
    ),
    "the same, big end first": (
        "a.tsv",
        "text\tlabel\na\t1\n".encode("utf-16-be"),
        "iconv -f utf-16be -t utf-8",
    ),
    "Latin-1": ("a.csv", "text,label\ngrößer,1\nb,0\n".encode("latin1"), "byte 13.*iconv -f latin1 -t utf-8"),
}


@pytest.mark.parametrize("kind", REJECTED)
def test_what_is_no_table_of_texts_is_rejected_in_a_line(kind: str, tmp_path: Path) -> None:
    name, content, said = REJECTED[kind]
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=said) as caught:
        TextTsv(path=str(tmp_path / name)).load(val=Duration(0, "percent"), seed=0)
    assert str(caught.value).isprintable()


def test_delimiters_inside_of_unquoted_texts_belong_to_them(tmp_path: Path) -> None:
    rows = [("good", "1"), ("bad, very bad", "0"), ("so, so, so", "0"), ("fine", "1"), ("fine, too", "1")]
    (tmp_path / "a.csv").write_text("".join(f"{text},{label}\n" for text, label in rows))
    table = read_table(tmp_path / "a.csv")
    assert [*zip(table.texts, table.labels or (), strict=True)] == rows
