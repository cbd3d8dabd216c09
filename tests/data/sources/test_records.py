"""Texts and tables in JSON lines and Parquet: the same samples as in CSV, or a line that names the record."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ptfast.core.durations import Duration
from ptfast.core.errors import DataError
from ptfast.data.build_data import build_data
from ptfast.data.new_inputs import read_inputs
from ptfast.data.sources.table import Table
from ptfast.data.sources.text_dataset import TextTsv

RECORDS = [
    {"id": i, "text": f"{'good' if i % 2 else 'bad'} film, {i}", "label": "pos" if i % 2 else "neg"}
    for i in range(8)
]
NO_VAL = Duration(0, "percent")


def write(folder: Path, kind: str, records: list[dict[str, Any]]) -> Path:
    path = folder / f"t.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n\n" for record in records))
    elif kind == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
        import pyarrow

        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        with path.open("w", newline="") as file:
            out = csv.DictWriter(file, [*records[0]])
            out.writeheader()
            out.writerows(records)
    return path


def texts(path: Path, **keys: Any) -> Any:
    return build_data(TextTsv(path=str(path), **keys), val=NO_VAL, seed=0, task="auto")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_texts_are_those_of_the_same_csv(tmp_path: Path, kind: str):
    path = write(tmp_path, kind, RECORDS)
    found, wanted = texts(path), texts(write(tmp_path, "csv", RECORDS))
    for ours, theirs in zip(*(data.train.fetch(np.arange(8)) for data in (found, wanted)), strict=True):
        assert ours.equal(theirs)
    assert found.info.class_names == ("neg", "pos")
    ((names, inputs),) = read_inputs(found.info, [str(path)], device=torch.device("cpu"))
    assert (len(names), len(inputs)) == (8, 8)


def test_fields_are_named_by_keys_and_labels_may_be_of_any_plain_type(tmp_path: Path):
    records = [{"body": f"word {i}", "title": "a", "spam": i % 3 == 0, "tags": ["x"]} for i in range(6)]
    data = texts(write(tmp_path, "jsonl", records), text=["title", "body"], label="spam")
    assert data.info.class_names == ("False", "True")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": ["a"], "label": "x"}', r"t\.jsonl:2: text is a list or an object, where text is expected"),
        ('{"text": "a"}', r"t\.jsonl:2: has no label"),
        ('{"text": "a", "label": null}', r"t\.jsonl:2: has no label"),
        ('["a", "x"]', r"t\.jsonl:2: is no JSON object"),
        ("text", r"t\.jsonl:2: is no JSON: "),
        ("[" * 100_000, r"t\.jsonl:2: is no JSON: "),
    ],
)
def test_a_record_that_does_not_fit_is_named(tmp_path: Path, line: str, words: str):
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "b", "label": "y"}\n' + line + "\n")
    with pytest.raises(DataError, match=words):
        texts(path)


def test_a_table_of_records_is_that_of_the_same_csv(tmp_path: Path):
    records = [{"n": i / 2, "c": "ab"[i % 2], "y": i * 1.5} for i in range(8)]
    records[3]["n"] = None
    found, wanted = (
        build_data(Table(str(write(tmp_path, kind, records)), "y"), val=NO_VAL, seed=0, task="auto")
        for kind in ("jsonl", "csv")
    )
    assert found.train.inputs.equal(wanted.train.inputs)
    assert found.info.extra["table"]["columns"] == wanted.info.extra["table"]["columns"]
