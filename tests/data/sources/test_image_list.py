"""Image lists: the images and labels that a CSV file names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from running import train

from ptfast.cli import command_line
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, DataError
from ptfast.data.build_data import build_data
from ptfast.data.sources.image_list import ImageList

COLORS = {"red": (220, 30, 30), "green": (30, 220, 30), "blue": (30, 30, 220)}


def draw(folder: Path, num: int = 12) -> list[tuple[str, str]]:
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(num):
        color = [*COLORS][i % 3]
        Image.new("RGB", (8, 8), COLORS[color]).save(folder / f"i{i}.png")
        rows.append((f"i{i}.png", color))
    return rows


def write(path: Path, header: str, rows: list[Any]) -> Path:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def load(path: Path, task: str = "auto", **kwargs: Any) -> Any:
    return build_data(ImageList(str(path), **kwargs), val=Duration(0, "percent"), seed=0, task=task)


def test_names_and_classes_come_from_the_columns(tmp_path: Path):
    rows = draw(tmp_path / "images")
    data = load(write(tmp_path / "train.csv", "id,label", rows), root=str(tmp_path / "images"))
    assert data.info.class_names == ("blue", "green", "red")
    pixels, labels = data.train.fetch(np.arange(12))
    for image, label in zip(pixels, labels, strict=True):
        assert tuple(image[0, 0].tolist()) == COLORS[data.info.class_names[label]]
    assert "image from id, label from label" in data.note


def test_an_extension_is_appended_and_the_folder_of_the_list_is_the_root(tmp_path: Path):
    rows = [(name.removesuffix(".png"), 10 * i, i) for i, (name, _) in enumerate(draw(tmp_path))]
    path = write(tmp_path / "train.csv", "name,x,y", rows)
    data = load(path, image="name", label="y", extension=".png", task="regression")
    assert (data.info.task, data.train.targets.tolist()) == ("regression", [float(i) for i in range(12)])
    assert load(path, image="name", label=["x", "y"], extension=".png").train.targets.shape == (12, 2)


def test_several_columns_of_0_and_1_are_labels_that_hold_together(tmp_path: Path):
    rows = [(name, int(color == "red"), int(color != "blue")) for name, color in draw(tmp_path)]
    data = load(write(tmp_path / "train.csv", "image,red,warm", rows), label=["red", "warm"])
    assert (data.info.task, data.info.class_names, data.info.num_classes) == (
        "multilabel",
        ("red", "warm"),
        2,
    )


def test_repeated_rows_count_once_and_contradictions_are_named(tmp_path: Path):
    rows = draw(tmp_path)
    data = load(write(tmp_path / "train.csv", "image,label", [*rows, rows[0]]))
    assert len(data.train) == 12
    assert "1 repeated rows are left out" in data.note
    write(tmp_path / "train.csv", "image,label", [*rows, (rows[0][0], "blue")])
    with pytest.raises(DataError, match=r"train\.csv:14: i0\.png has another label in row 2") as caught:
        load(tmp_path / "train.csv")
    assert caught.value.code == "D004"


def test_absolute_names_need_no_root(tmp_path: Path):
    rows = [(tmp_path / "images" / name, color) for name, color in draw(tmp_path / "images")]
    write(tmp_path / "train.csv", "image,label", rows)
    for keys in ({}, {"root": str(tmp_path / "elsewhere")}):
        assert load(tmp_path / "train.csv", **keys).train.paths == [str(path) for path, _ in rows]


def test_a_label_that_only_validation_has_names_its_row(tmp_path: Path):
    rows = draw(tmp_path)
    val = write(tmp_path / "val.csv", "image,label", [rows[0], (rows[1][0], "purple")])
    path = write(tmp_path / "train.csv", "image,label", rows)
    words = r"data\.label=label: \S*val\.csv:3: label purple does not occur in training"
    with pytest.raises(DataError, match=words) as caught:
        load(path, val_path=str(val))
    assert caught.value.code == "D004"


@pytest.mark.parametrize(
    ("header", "change", "keys", "code", "words"),
    [
        (
            "image,label",
            lambda rows: [("gone.png", "red"), *rows],
            {},
            "D005",
            "1 of 13 images are not there",
        ),
        ("a,b,c", lambda rows: [(*row, 1) for row in rows], {}, "D005", "is unclear: a, b, c"),
        ("image,label", lambda rows: rows, {"label": "lable"}, "D005", "Did you mean label?"),
        ("image,label", lambda rows: [("i0.png", ""), *rows[1:]], {}, "D004", "train.csv:2: has no label"),
        (
            "image,label",
            lambda rows: [(name, "red") for name, _ in rows],
            {},
            "D003",
            "every training label is red",
        ),
    ],
)
def test_a_list_that_does_not_fit_is_rejected_in_one_line(
    tmp_path: Path, header: str, change: Any, keys: dict[str, Any], code: str, words: str
):
    path = write(tmp_path / "train.csv", header, change(draw(tmp_path)))
    with pytest.raises(DataError, match=re.escape(words)) as caught:
        load(path, **keys)
    assert caught.value.code == code


def test_missing_files_are_left_out_on_request_where_there_are_classes(tmp_path: Path):
    path = write(tmp_path / "train.csv", "image,label", [("gone.png", "red"), *draw(tmp_path)])
    data = load(path, on_corrupt="skip")
    assert data.train.fetch(np.arange(13))[1].tolist()[0] == -100
    with pytest.raises(ConfigError, match="needs classes"):
        load(
            write(tmp_path / "t.csv", "image,y", [(f"i{i}.png", i + 0.5) for i in range(12)]),
            on_corrupt="skip",
        )


def test_an_image_list_trains_and_predicts_for_files(in_tmp: Path, capsys: pytest.CaptureFixture[str]):
    write(Path("train.csv"), "image,label", draw(Path("images"), 60))
    words = ("data=image_list", "data.path=train.csv", "data.root=images", "model=mlp", "device=cpu")
    assert train(*words, "epochs=6", "batch_size=8", "optimizer.lr=1e-2", "run.dir=run") == 0
    capsys.readouterr()
    assert command_line.run(["predict", "run", "images/i0.png", "images/i1.png"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [max(each["top"], key=each["top"].get) for each in records] == ["red", "green"]
