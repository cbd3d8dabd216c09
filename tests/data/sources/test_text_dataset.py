"""Text: labelled lines, running text, and how prediction reads them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ptfast.core.durations import Duration
from ptfast.core.errors import DataError
from ptfast.data.build_data import build_data
from ptfast.data.new_inputs import read_inputs
from ptfast.data.sources.text_dataset import TextFile, TextTsv

TEN_PERCENT, NO_VAL = Duration(10, "percent"), Duration(0, "percent")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.tsv").write_text("a good film\t1\nbad film\t0\n\na a a\t1\n", encoding="utf-8")
    (tmp_path / "dev.tsv").write_text("a terrible film\t0\r\n", encoding="utf-8")
    return tmp_path


def load(source: Any, val: Duration = NO_VAL) -> Any:
    return build_data(source, val=val, seed=0, task="auto")


def test_words_are_numbered_by_frequency_and_padded_to_the_longest(folder: Path):
    data = load(TextTsv(str(folder)))
    vocabulary = data.info.extra["tokenizer"]["entries"]
    assert vocabulary == ["<pad>", "<unk>", "a", "film", "bad", "good"]
    assert (data.info.vocab_size, data.info.pad_id, data.info.class_names) == (6, 0, ("0", "1"))
    tokens, labels = data.train.fetch(np.array([1, 0]))
    assert tokens.tolist() == [[4, 3, 0], [2, 5, 3]]
    assert labels.tolist() == [0, 1]
    assert data.train.fetch(np.array([1]))[0].tolist() == [[4, 3]]
    assert data.val.fetch(np.array([0]))[0].tolist() == [[2, 1, 3]]


def test_texts_are_cut_and_rare_words_unknown(folder: Path):
    data = load(TextTsv(str(folder), max_length=2, min_count=2))
    assert data.train.fetch(np.array([0, 2]))[0].tolist() == [[2, 1], [2, 2]]


def test_characters_are_tokens_too(folder: Path):
    data = load(TextTsv(path=str(folder / "train.tsv"), tokenizer="characters"), Duration(1, "samples"))
    assert data.info.vocab_size == 2 + len(set("a good filmbad film"))
    assert data.note == "text_tsv: 2 train, 1 val"


@pytest.mark.parametrize(
    ("train", "dev", "line"),
    [
        ("no label here\n", "x\t0\n", r"train\.tsv:1: has no label"),
        ("x\t1\ny\t1\n", "x\t1\n", "every training label is 1"),
        ("x\t1\ny\t0\n", "x\t2\n", "label 2 does not occur in training"),
        ("  \n", "x\t0\n", "contains no text"),
    ],
)
def test_files_that_do_not_fit(folder: Path, train: str, dev: str, line: str):
    (folder / "train.tsv").write_text(train)
    (folder / "dev.tsv").write_text(dev)
    with pytest.raises(DataError, match=line):
        load(TextTsv(str(folder)))


def test_paths_that_do_not_fit(folder: Path):
    with pytest.raises(DataError, match="no such folder"):
        load(TextTsv(str(folder / "x")))
    with pytest.raises(DataError, match="is a file, not a folder"):
        load(TextTsv(str(folder / "dev.tsv")))
    with pytest.raises(DataError, match="no path is given"):
        load(TextTsv())
    (folder / "dev.tsv").write_bytes(b"caf\xe9\t0\n")
    with pytest.raises(DataError, match="is not UTF-8 text"):
        load(TextTsv(str(folder)))


ROWS = "a good film\t1\nbad film\t0\n"


@pytest.mark.parametrize(
    ("header", "note"),
    [
        ("sentence\tlabel\n", "train.tsv: text from sentence, label from label"),
        ("Review\tSentiment\n", "train.tsv: text from Review, label from Sentiment"),
        # No name that is known, but no number where all others are.
        ("words\tstars\n", "train.tsv: text from words, label from stars"),
        ("", ""),
    ],
)
def test_a_line_of_column_names_is_no_sample(folder: Path, header: str, note: str):
    (folder / "train.tsv").write_text(header + ROWS)
    data = load(TextTsv(str(folder)))
    assert (len(data.train), data.info.class_names) == (2, ("0", "1"))
    assert "sentence" not in data.info.extra["tokenizer"]["entries"]
    assert data.note == "text_tsv: 2 train, 1 val" + (f"; {note}" if note else "")


@pytest.mark.parametrize(
    "rows",
    [
        "a label\tpositive\nx\tnegative\ny\tpositive\n",  # its label occurs again
        "the text\tfine\nx\tbad\ny\tgood\n",  # a class of one sample, and no name of a column
        "3\tlabel\nx\tother\ny\tlabel\n",
        "what a long first sentence this is\tnone\nx\t1\ny\t0\n",
    ],
)
def test_a_sample_in_the_first_line_stays_one(tmp_path: Path, rows: str):
    (tmp_path / "train.tsv").write_text(rows)
    assert len(load(TextTsv(path=str(tmp_path / "train.tsv"))).train) == 3


def test_a_first_line_that_may_name_columns_is_not_read_as_a_sample(tmp_path: Path):
    path = tmp_path / "train.tsv"
    path.write_text("utterance\tmood\n" + "a good film\tjoy\nbad film\tanger\n" * 4)
    with pytest.raises(DataError, match=r"train\.tsv:1: may name columns .* its label mood\. Set data\.text"):
        load(TextTsv(path=str(path)))
    data = load(TextTsv(path=str(path), text="utterance", label="mood"))
    assert data.info.class_names == ("anger", "joy")


def test_columns_that_are_named_are_found_by_their_names(folder: Path):
    (folder / "train.tsv").write_text("id\tlabel\tsentence\n7\t1\ta good film\n8\t0\tbad film\n")
    (folder / "test.tsv").write_text("index\tsentence\n0\ta film\n1\ta film\n")
    data = load(TextTsv(str(folder)))
    assert set(data.info.extra["tokenizer"]["entries"][2:]) == {"a", "good", "film", "bad"}
    assert (data.info.class_names, data.test) == (("0", "1"), None)
    assert "test.tsv: no labels, so it is left out" in data.note
    (folder / "dev.tsv").write_text("index\tsentence\n0\ta film\n")
    with pytest.raises(
        DataError, match=r"dev\.tsv:1: its first line names .* no label among them: index, se"
    ):
        load(TextTsv(str(folder)))
    (folder / "dev.tsv").write_text("id\tlabel\tsentence\n0\t1\n")
    with pytest.raises(DataError, match=r"dev\.tsv:2: has 2 of the 3 columns that the first line names"):
        load(TextTsv(str(folder)))


def test_csv_has_quotes(tmp_path: Path):
    long = "word " * 40_000
    rows = f'label,text\n1,"a good, ""fine"" film\nin two lines"\r\n\r\n0,bad film\n1,{long}\n'
    (tmp_path / "train.csv").write_text(rows, newline="")
    (tmp_path / "dev.csv").write_text('"a, b",0\n')
    data = load(TextTsv(str(tmp_path)))
    entries = data.info.extra["tokenizer"]["entries"]
    assert {"good,", '"fine"', "lines", "bad"} < set(entries)
    assert (len(data.train), len(data.val), data.info.class_names) == (3, 1, ("0", "1"))
    for bad, line in (
        ('x,1\n"never closed,0\n', r"csv:2: is not a CSV file"),
        ("x,1\ny\n", r"csv:2: has no label"),
    ):
        (tmp_path / "dev.csv").write_text(bad)
        with pytest.raises(DataError, match=line) as caught:
            load(TextTsv(str(tmp_path)))
        assert caught.value.code == "D005"


REVIEWS = [
    ("5", "Nice", "good, really", "pos"),
    ("1", "No", "bad; so bad", "neg"),
    ("4", "Well", "fine", "pos"),
]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 3, 0, 1)])
def test_columns_of_a_csv_are_named_where_several_could_be_meant(
    tmp_path: Path, order: tuple[int, ...], delimiter: str
):
    path = tmp_path / "reviews.csv"
    with path.open("w", newline="") as file:
        rows = [("rating", "title", "body", "sentiment"), *REVIEWS]
        csv.writer(file, delimiter=delimiter).writerows([row[i] for i in order] for row in rows)
    with pytest.raises(
        DataError, match=r"csv:1: which of its 4 columns .*Set data\.text.* \(.*body.*\)"
    ) as caught:
        load(TextTsv(path=str(path)))
    assert caught.value.code == "D005"
    data = load(TextTsv(path=str(path), text=["title", "body"], label="sentiment"))
    assert data.info.class_names == ("neg", "pos")
    words = {"Nice", "good,", "really", "No", "bad;", "so", "bad", "Well", "fine"}
    assert {*data.info.extra["tokenizer"]["entries"][2:]} == words
    assert data.note.endswith("; reviews.csv: text from title and body, label from sentiment")
    # What is predicted is read from the same columns.
    ((_, inputs),) = read_inputs(data.info, [str(path)], device=torch.device("cpu"))
    assert torch.equal(inputs, data.train.fetch(np.arange(3))[0])
    with pytest.raises(DataError, match=r"data\.text=review: no such column in the first line, which is"):
        load(TextTsv(path=str(path), text="review"))
    with pytest.raises(DataError, match=r"names columns, and no stars among them: .*Set data\.label"):
        load(TextTsv(path=str(path), label="stars"))


@pytest.mark.parametrize(
    ("first", "row"),
    [
        ("text,id,score", "text {0},{0},{0}.5"),
        ("text,score", "text {0},0.{0}"),
        ("1,some text", "1,text {0}"),
        ("7,title,pos", "{0},title {0},neg"),
        ("label,class,text", "{0},1,text {0}"),
        ("id,question,sentence,label", "{0},why {0},so {0},1"),
    ],
)
def test_columns_that_are_not_clear_are_refused(tmp_path: Path, first: str, row: str):
    (tmp_path / "train.csv").write_text("\n".join([first, *map(row.format, range(300))]))
    with pytest.raises(DataError, match=r"train\.csv:1: .*(Set .*data\.label to|Begin it with) ") as caught:
        load(TextTsv(path=str(tmp_path / "train.csv")))
    assert caught.value.code == "D005"


@pytest.fixture
def running(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(97 + i % 26) for i in range(1000)))
    return path


def test_running_text_is_cut_into_a_tail_to_validate_on_and_windows_to_train_on(running: Path):
    data = load(TextFile(str(running), context_length=10), TEN_PERCENT)
    assert (len(data.train), len(data.val)) == (89, 10)
    assert (data.info.vocab_size, data.info.token_bytes, data.info.num_classes) == (26, 1.0, None)
    inputs, targets = data.val.fetch(np.arange(10))
    assert inputs.flatten().tolist() == [i % 26 for i in range(899, 999)]
    assert targets.flatten().tolist() == [i % 26 for i in range(900, 1000)]


def test_training_windows_move_from_epoch_to_epoch_and_come_back(running: Path):
    data = load(TextFile(str(running), context_length=10), TEN_PERCENT)
    indices = np.arange(len(data.train))
    inputs, targets = data.train.fetch(indices, 0)
    assert torch.equal((inputs + 1) % 26, targets)
    assert torch.equal(inputs[[5, 2]], data.train.fetch(np.array([5, 2]), 0)[0])
    assert not torch.equal(inputs, data.train.fetch(indices, 1)[0])


def test_training_windows_never_reach_into_the_tail(tmp_path: Path):
    path = tmp_path / "text.txt"
    path.write_text("a" * 900 + "b" * 100)
    data = load(TextFile(str(path), context_length=10), TEN_PERCENT)
    for epoch in range(20):
        inputs, targets = data.train.fetch(np.arange(len(data.train)), epoch)
        assert int(inputs.max()) == 0
        assert int(targets.sum()) <= len(data.train)
        assert int(targets[:, :-1].max()) == 0


def test_a_text_shorter_than_a_window_is_refused(running: Path):
    with pytest.raises(DataError, match="fewer than one sample"):
        load(TextFile(str(running), context_length=1000))


def test_prediction_reads_lines_with_the_vocabulary_of_training(folder: Path, tmp_path: Path):
    info = load(TextTsv(str(folder))).info
    path = tmp_path / "new.txt"
    path.write_text("a film\n\ngood bad unseen\n")
    ((names, inputs),) = read_inputs(info, [str(path)], device=torch.device("cpu"))
    assert names == [f"{path}:1", f"{path}:3"]
    assert inputs.tolist() == [[2, 3, 0], [5, 4, 1]]
