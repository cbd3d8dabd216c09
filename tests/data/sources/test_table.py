"""Tables: kinds of columns, the fitted preparation, targets; predictions and exports give equal numbers."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import train

from ptfast.cli import command_line
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, DataError
from ptfast.core.run_records import InputFacts, checked
from ptfast.data.build_data import build_data
from ptfast.data.dataset import read_info
from ptfast.data.new_inputs import read_inputs
from ptfast.data.sources.table import Table
from ptfast.data.tables.columns import read_columns
from ptfast.data.tables.preparation import MOST_CATEGORIES, Preparation
from ptfast.models.mlp import Mlp

NONE, TENTH = Duration(0, "percent"), Duration(10, "percent")


def write(path: Path, header: str, *rows: str) -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def load(path: Path, target: str = "y", val: Duration = NONE, task: str = "auto", **kwargs: Any) -> Any:
    return build_data(Table(str(path), target, **kwargs), val=val, seed=0, task=task)


def houses(path: Path, num: int = 240) -> Path:
    rng = np.random.default_rng(0)
    cities = {"Oslo": 1.5, "Paris": 2.0, "Rome": 1.0}
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["city", "rooms", "built", "price", "grade"])
        for _ in range(num):
            city, rooms = str(rng.choice([*cities])), int(rng.integers(1, 6))
            price = 100_000 + 40_000 * rooms * cities[city] + rng.normal(0, 2000)
            row = [
                city,
                "" if rng.random() < 0.1 else rooms,
                f"20{rng.integers(10, 25)}-01-{rng.integers(10, 28)}",
            ]
            out.writerow([*row, f"{price:.1f}", "high" if price > 220_000 else "low"])
    return path


def test_columns_become_numbers_flags_of_missing_ones_and_category_numbers(tmp_path: Path):
    rows = "1,b,2020-01-02,0.5", ",a,2020-01-01,1.5", "3,b,,2.5", "8,,2020-01-04,3.5"
    data = load(write(tmp_path / "t.csv", "n,c,d,y", *rows))
    # Numbers n and d with the median where they are missing, a flag for each, then the category.
    days = 18262.0
    wanted = [
        [1, days + 1, 0, 0, 3],
        [3, days, 1, 0, 2],
        [3, days + 1, 0, 1, 3],
        [8, days + 3, 0, 0, 1],
    ]
    assert data.train.inputs.tolist() == wanted
    assert (data.info.categories, data.info.input_shape) == ((4,), (5,))
    statistics = data.info.extra["normalize"]
    assert statistics["mean"][4] == 0
    assert statistics["std"][4] == 1
    assert statistics["mean"][0] == pytest.approx(np.mean([1, 3, 3, 8]))
    assert data.train.targets.tolist() == [0.5, 1.5, 2.5, 3.5]
    assert data.info.target_scale == pytest.approx((2.0, np.std([0.5, 1.5, 2.5, 3.5])))


def test_the_preparation_knows_only_the_rows_that_are_trained_on(tmp_path: Path):
    rows = [f"{i},{'rare' if i == 7 else 'ab'[i % 2]},{i / 2}" for i in range(40)]
    path = write(tmp_path / "t.csv", "n,c,y", *rows)
    for seed in range(40):
        data = build_data(Table(str(path), "y"), val=TENTH, seed=seed, task="auto")
        if bool((data.val.inputs[:, 1] == 0).any()):
            break
    assert data.info.categories == (3,)
    assert "val has categories that training does not have: c=rare" in data.note
    assert data.info.extra["normalize"]["mean"][0] == pytest.approx(data.train.inputs[:, 0].mean().item())


@pytest.mark.parametrize(
    ("values", "task", "found", "classes"),
    [
        (["no", "yes", "no", "yes"], "auto", "classification", ("no", "yes")),
        (["True", "False", "True", "False"], "auto", "classification", ("False", "True")),
        (["3", "10", "3", "10"], "auto", "classification", ("3", "10")),
        (["3", "10", "3", "10"], "regression", "regression", None),
        (["3.5", "10", "3", "10"], "auto", "regression", None),
    ],
)
def test_the_target_tells_the_task(
    tmp_path: Path, values: list[str], task: str, found: str, classes: tuple[str, ...] | None
):
    path = write(tmp_path / "t.csv", "x,y", *(f"{i},{value}" for i, value in enumerate(values)))
    data = load(path, task=task)
    assert (data.info.task, data.info.class_names) == (found, classes)
    if found == "regression":
        assert data.train.targets.tolist() == [float(value) for value in values]
    else:
        assert [data.info.class_names[i] for i in data.train.targets] == values


def test_columns_that_tell_nothing_are_left_out_with_a_note(tmp_path: Path):
    rows = [f"{i},k{i},x,,{i % 7},{i}" for i in range(60)]
    data = load(write(tmp_path / "t.csv", "x,name,constant,empty,n,y", *rows))
    assert data.info.input_shape == (2,)
    for words in ("name is left out: 60 different values", "constant is left out: it is constant"):
        assert words in data.note
    assert "empty is left out: it has no values" in data.note


@pytest.mark.parametrize(
    ("values", "wanted"),
    [(["1,5", "22,25", "3"], [1.5, 22.25, 3]), (["1,234,567", "1,000.5", "2"], [1234567, 1000.5, 2])],
)
def test_a_comma_in_numbers_is_read_where_only_one_meaning_fits(
    tmp_path: Path, values: list[str], wanted: list[float]
):
    rows = (f"{value};{i}.5" for i, value in enumerate(values))
    assert load(write(tmp_path / "t.csv", "x;y", *rows)).train.inputs[:, 0].tolist() == wanted


@pytest.mark.parametrize(
    ("header", "rows", "target", "code", "words"),
    [
        ("x,y", ["1,2", "3,4.5"], "z", "D005", "has no such column"),
        ("x,y", ["1,2.5", "3,"], "y", "D004", "has no y"),
        ("x;y", ["1,234;2.5", "3,456;1.5"], "y", "D005", "may mean two things"),
        ("x,x,y", ["1,2,3", "1,2,4.5"], "y", "D005", "names the column x twice"),
        ("x,y", [], "y", "D002", "contains no rows"),
        ("x,y", ["a,b", "b,b"], "y", "D003", "every training label is b"),
        ("x,y", ["1,2.5", "1,3.5"], "y", "D005", "no column other than y"),
        ("x,z,y", ["1,2,2.5", "1,3.5"], "y", "D005", "has 2 of the 3 columns"),
        ("x,y", ["inf,2.5", "1,3.5"], "y", "D005", "x is infinite"),
    ],
)
def test_a_table_that_cannot_be_read_is_rejected_in_one_line(
    tmp_path: Path, header: str, rows: list[str], target: str, code: str, words: str
):
    with pytest.raises(DataError, match=re.escape(words)) as caught:
        load(write(tmp_path / "t.csv", header, *rows), target)
    assert caught.value.code == code


def test_a_class_that_only_validation_has_names_its_row(tmp_path: Path):
    train_file = write(tmp_path / "t.csv", "x,y", "1,a", "2,b", "3,a")
    val = write(tmp_path / "v.csv", "x,y", "1,a", "2,c")
    with pytest.raises(DataError, match=r"data.target=y: \S*v\.csv:3: label c does not occur in training"):
        load(train_file, val_path=str(val))


@pytest.mark.parametrize(
    ("header", "rows", "words"),
    [
        ("n,y", ["1,1.5", "2,many"], r"v\.csv:3: y is a number in the training rows, and here it is many"),
        ("n,y", ["1,1.5", "x,2.5"], r"v\.csv:3: n=x is no number, as in training"),
        ("m,y", ["1,1.5"], r"v\.csv: has no column n, which the model was trained on"),
    ],
)
def test_held_out_rows_that_do_not_fit_training_are_named(
    tmp_path: Path, header: str, rows: list[str], words: str
):
    train_file = write(tmp_path / "t.csv", "n,y", "1,1.5", "2,2.5", "3,4.5")
    with pytest.raises(DataError, match=words):
        load(train_file, val_path=str(write(tmp_path / "v.csv", header, *rows)))


def test_dates_of_another_form_are_categories(tmp_path: Path):
    rows = (f"0{1 + i % 3}/12/2020,2020-12-0{1 + i % 3},{i}.5" for i in range(40))
    data = load(write(tmp_path / "t.csv", "day,iso,y", *rows))
    assert data.info.categories == (4,)
    assert {*data.train.inputs[:, 0].tolist()} == {18597.0, 18598.0, 18599.0}


def test_more_categories_than_are_kept_share_one(tmp_path: Path):
    size = MOST_CATEGORIES + 500
    rows = [f"k{i % size:05},{i % 7}.5" for i in range(size + 100)]
    path = write(tmp_path / "t.csv", "c,y", *rows)
    with pytest.raises(
        DataError, match="no column other than y differs between rows: c is left out: 10,500 different"
    ):
        load(path)
    data = load(path, categorical=["c"])
    assert data.info.categories == (MOST_CATEGORIES + 1,)
    assert "c: the rarest 500 values are one category" in data.note
    assert int((data.train.inputs[:, 0] == 0).sum()) == 500
    # The hundred values that come twice are kept.
    assert bool((data.train.inputs[:100, 0] > 0).all())


def test_parquet_gives_the_columns_of_the_same_csv(tmp_path: Path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    import pyarrow

    columns = {"n": [1.0, None, 3.0], "c": ["a", None, "b"], "y": [0.5, 1.5, 2.5]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    from_csv = load(write(tmp_path / "t.csv", "n,c,y", "1,a,0.5", ",,1.5", "3,b,2.5"))
    from_parquet = load(tmp_path / "t.parquet")
    assert from_parquet.train.inputs.equal(from_csv.train.inputs)
    assert from_parquet.info.extra["table"] == from_csv.info.extra["table"]


def test_the_preparation_survives_json(tmp_path: Path):
    path = houses(tmp_path / "t.csv")
    data = load(path, "price", ignore=["grade"])
    saved = read_info(json.loads(json.dumps(data.info.__dict__)))
    rows = read_columns(path)
    again = Preparation.from_facts(saved.extra["table"]["columns"])(rows.columns, rows.file, rows.numbers)
    assert torch.from_numpy(again).equal(data.train.inputs)
    inputs = torch.cat([batch for _, batch in read_inputs(saved, [str(path)], device=torch.device("cpu"))])
    assert inputs[:, -1].equal(data.train.inputs[:, -1])


@pytest.mark.parametrize("change", [{"kind": "code"}, {"fill": "1"}, {"values": "ab"}, {"extra": 1}])
def test_a_strangers_preparation_is_checked_by_type(tmp_path: Path, change: dict[str, Any]):
    data = load(write(tmp_path / "t.csv", "n,c,y", "1,a,0.5", "2,b,1.5"))
    facts = json.loads(json.dumps(data.info.extra))
    checked(InputFacts, json.dumps(facts))
    facts["table"]["columns"][0] |= change
    with pytest.raises(ValueError, match="table"):
        checked(InputFacts, json.dumps(facts))


def test_unknown_categories_count_for_nothing_and_low_precision_is_rejected():
    model = Mlp((3,), 1, hidden=[], categories=[4, 300], target_scale=(100.0, 10.0))
    with torch.no_grad():
        out = model(torch.tensor([[1.0, 0, 0]]))
        linear = model.layers[1]
        assert out.item() == pytest.approx((linear.weight[0, 0] + linear.bias).item() * 10 + 100, rel=1e-6)
    with pytest.raises(ConfigError, match="16-bit inputs cannot represent the numbers of 300 categories"):
        model(torch.zeros(1, 3, dtype=torch.bfloat16))


@pytest.mark.slow
def test_a_table_trains_predicts_and_exports_to_the_same_numbers(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
):
    houses(Path("t.csv"))
    words = "model=mlp", "epochs=30", "optimizer.lr=3e-3", "device=cpu", "data.ignore=[grade]"
    assert train("data=table", "data.path=t.csv", "data.target=price", *words, "run.dir=run") == 0
    last = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()][-1]
    assert last["mae"] < 15_000, "the spread of the prices is 80,000"
    write(
        Path("new.csv"), "city,rooms,built", "Rome,3,2020-05-11", "Berlin,,2021-01-10", "Paris,2,2015-01-10"
    )
    capsys.readouterr()
    assert command_line.run(["predict", "run", "new.csv"]) == 0
    predicted = [json.loads(line)["value"] for line in capsys.readouterr().out.splitlines()]
    assert command_line.run(["export", "run", "--out", "out"]) == 0
    script = [sys.executable, "-I", "out/load.py", "new.csv"]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    values = [json.loads(line.partition(": ")[2])[0] for line in done.stdout.splitlines()]
    assert values == pytest.approx(predicted, rel=1e-6)
    assert len(values) == 3


def test_classes_of_a_table_are_named_in_predictions(in_tmp: Path, capsys: pytest.CaptureFixture[str]):
    houses(Path("t.csv"))
    words = "model=mlp", "epochs=20", "optimizer.lr=3e-3", "device=cpu", "data.ignore=[price]"
    assert train("data=table", "data.path=t.csv", "data.target=grade", *words, "run.dir=run") == 0
    write(Path("new.csv"), "city,rooms,built,price", "Rome,1,2020-05-11,", "Paris,5,2015-01-10,")
    capsys.readouterr()
    assert command_line.run(["predict", "run", "new.csv"]) == 0
    found = [
        max(json.loads(line)["top"].items(), key=lambda each: each[1])[0]
        for line in capsys.readouterr().out.splitlines()
    ]
    assert found == ["low", "high"]
