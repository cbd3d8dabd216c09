"""Splits of datasets of each kind, cut by classes, groups, folds and fractions, in runs and by themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from resuming import arm
from running import records, same_bits, summary, train, weights
from torch.utils.data import TensorDataset
from toys import Stream

import ptfast
from ptfast.config.read import read_config
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, DataError
from ptfast.data.build_data import build_data
from ptfast.data.dataset import Data
from ptfast.data.map_source import MapSource
from ptfast.data.sampling.splits import SplitRules
from ptfast.data.sources.image_list import ImageList
from ptfast.data.sources.imagefolder import ImageFolder
from ptfast.data.sources.table import Table
from ptfast.data.sources.text_dataset import TextFile, TextTsv

FOLDS = ("data=digits", "model=mlp", "model.hidden=[8]", "data.folds=4", "data.fold=2", "batch_size=128")


class Visits(TensorDataset):
    """Forty samples of two classes, four of each patient."""

    def __init__(self, split: str = "all") -> None:
        self.split, self.patient = split, np.arange(40) // 4
        labels = torch.arange(40) % 2
        super().__init__(
            torch.randn(40, 3, generator=torch.Generator().manual_seed(0)) + labels[:, None], labels
        )


def cut(source: object, percent: float = 25, task: str = "auto", **rules: object) -> Data:
    return build_data(source, val=Duration(percent, "percent"), seed=0, task=task, rules=SplitRules(**rules))  # pyright: ignore[reportArgumentType]


def labels_of(data: Data) -> dict[str, list[int]]:
    sources = {split: source for split, source in data.sources.items() if isinstance(source, MapSource)}
    return {split: np.bincount(source.known_labels()).tolist() for split, source in sources.items()}  # pyright: ignore[reportArgumentType,reportCallIssue]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of 20, 20 and 3 images, which are of ten patients."""
    root = tmp_path_factory.mktemp("tree")
    for name, count in {"cat": 20, "dog": 20, "owl": 3}.items():
        (root / name).mkdir()
        for i in range(count):
            Image.new("RGB", (4, 4), (i, 0, 0)).save(root / name / f"patient{i % 10}_{i:02d}.png")
    return root


def test_each_class_of_folders_is_in_train_and_val(tree: Path):
    data = cut(ImageFolder(str(tree)), 10)
    counts = labels_of(data)
    assert sorted(counts["val"]) == [1, 1, 2]
    assert np.add(counts["train"], counts["val"]).tolist() == [20, 20, 3]


@pytest.mark.parametrize("pattern", [r"patient(\d+)_", r"patient\d"])
def test_images_are_grouped_by_a_pattern_in_their_paths(tree: Path, pattern: str):
    data = cut(ImageFolder(str(tree)), group=pattern)
    patients = {split: {Path(path).name[7] for path in each.paths} for split, each in data.sources.items()}  # pyright: ignore[reportAttributeAccessIssue]
    assert not patients["train"] & patients["val"]
    assert 8 <= len(data.val) <= 13  # pyright: ignore[reportArgumentType]


def test_images_of_a_list_are_grouped_by_a_column(tree: Path):
    rows = [
        f"{path.relative_to(tree)},{path.parent.name},{i % 7}"
        for i, path in enumerate(sorted(tree.rglob("*.png")))
    ]
    (tree / "list.csv").write_text("image,label,site\n" + "\n".join(rows) + "\n")
    sites = dict(zip([row.split(",")[0] for row in rows], [row.split(",")[2] for row in rows], strict=True))
    data = cut(ImageList(str(tree / "list.csv")), group="site")
    found = {
        split: {sites[str(Path(path).relative_to(tree))] for path in each.paths}  # pyright: ignore[reportAttributeAccessIssue]
        for split, each in data.sources.items()
    }
    assert not found["train"] & found["val"]


def test_rows_of_a_table_are_grouped_by_a_column_that_is_no_input(tmp_path: Path):
    rows = [f"{i % 5 + 0.5},{i // 8},{'yes' if i % 2 else 'no'}" for i in range(80)]
    (tmp_path / "visits.csv").write_text("dose,patient,ill\n" + "\n".join(rows) + "\n")
    data = cut(Table(str(tmp_path / "visits.csv"), "ill"), 20, group="patient")
    assert data.info.input_shape == (1,)
    assert (len(data.train), len(data.val)) == (64, 16)  # pyright: ignore[reportArgumentType]
    assert labels_of(cut(Table(str(tmp_path / "visits.csv"), "ill"), 20)) == {
        "train": [32, 32],
        "val": [8, 8],
    }
    assert len(cut(Table(str(tmp_path / "visits.csv"), "ill"), folds=4, fold=1).train) == 60  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError, match=r"data\.group=patent: .* has no such column"):
        cut(Table(str(tmp_path / "visits.csv"), "ill"), group="patent")


def test_texts_are_grouped_by_a_column(tmp_path: Path):
    rows = [f"word{i},{'good' if i % 2 else 'bad'},{i // 5}" for i in range(60)]
    (tmp_path / "texts.csv").write_text("text,label,author\n" + "\n".join(rows) + "\n")
    data = cut(TextTsv(path=str(tmp_path / "texts.csv")), group="author")
    assert (len(data.train), len(data.val)) == (45, 15)  # pyright: ignore[reportArgumentType]


def test_samples_are_grouped_by_an_attribute_of_the_dataset():
    data, dataset = cut(Visits(), group="patient"), Visits()
    assert data.kept is not None
    held = np.setdiff1d(np.arange(40), data.kept)
    assert not {*dataset.patient[data.kept]} & {*dataset.patient[held]}
    with pytest.raises(DataError, match="no attribute of the dataset"):
        cut(Visits(), group="doctor")


def test_a_fraction_is_of_each_class_and_leaves_val_alone():
    whole, half = cut(Visits()), cut(Visits(), fraction=Duration(50, "percent"))
    assert labels_of(half) == {"train": [8, 7], "val": [5, 5]} or labels_of(half)["train"] == [7, 8]
    assert torch.equal(whole.val.inputs, half.val.inputs)  # pyright: ignore[reportAttributeAccessIssue,reportOptionalMemberAccess]
    assert half.note.endswith("train is 50% of what is not held out")


def test_runs_that_say_nothing_of_the_split_keep_the_random_one():
    new = cut(Visits())
    old = {name: value for name, value in new.info.extra.items() if name != "split"}
    again = build_data(
        Visits(), val=Duration(25, "percent"), seed=0, task="auto", trained=replace(new.info, extra=old)
    )
    random = cut(Visits(), split="random")
    assert np.array_equal(again.kept, random.kept)  # pyright: ignore[reportArgumentType]
    assert not np.array_equal(again.kept, new.kept)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("rules", [{"folds": 5}, {"test": Duration(10, "percent")}, {"overfit": 8}])
def test_streams_and_running_text_cannot_be_cut(rules: dict[str, object], tmp_path: Path):
    with pytest.raises(ConfigError, match="iterable data cannot be divided"):
        cut(Stream(), 0, **rules)
    (tmp_path / "text.txt").write_text("To be, or not to be. " * 40)
    if "overfit" not in rules:
        with pytest.raises(ConfigError, match="no samples to choose from"):
            cut(TextFile(str(tmp_path / "text.txt"), "characters", 16), **rules)
    else:
        few = cut(TextFile(str(tmp_path / "text.txt"), "characters", 16), **rules)
        assert torch.equal(few.train.fetch(np.arange(8), 3)[0], few.val.fetch(np.arange(8))[0])  # pyright: ignore[reportAttributeAccessIssue,reportOptionalMemberAccess]


def test_a_killed_run_of_a_fold_resumes_to_the_same_bits_and_evaluates_the_same_samples(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*FOLDS, "epochs=2", "saving.every=4steps", "callbacks=[{_target_: resuming.Armed, step: 13}]")
    assert train(*words, "run.dir=whole") == 0
    arm("SIGTERM")
    assert train(*words, "run.dir=a", "run.resume=auto") == 75
    assert train(*words, "run.dir=a", "run.resume=auto") == 0
    assert same_bits(weights(Path("whole")), weights(Path("a")))
    assert "1,348 train, 449 val; val is fold 2 of 4" in capsys.readouterr().out
    figures = ptfast.evaluate("a")["val"]
    assert figures["accuracy"] == pytest.approx(summary(Path("a"))["best"]["accuracy"])


def test_a_test_split_is_evaluated_at_the_end_and_on_demand(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        train("data=digits", "data.test=20%", "model=mlp", "model.hidden=[8]", "epochs=1", "run.dir=a") == 0
    )
    assert "1,258 train, 180 val, 359 test" in capsys.readouterr().out
    assert ptfast.evaluate("a", split="test")["test"]["accuracy"] == summary(Path("a"))["test"]["accuracy"]


def test_a_table_is_prepared_without_its_test_rows(tmp_path: Path):
    rows = "\n".join(f"{i},{'ab'[i % 2]}" for i in range(40))
    (tmp_path / "rows.csv").write_text(f"x,label\n{rows}\n")
    data = cut(Table(str(tmp_path / "rows.csv"), "label"), test=Duration(25, "percent"))
    assert labels_of(data) == {"train": [10, 10], "val": [5, 5], "test": [5, 5]}
    (tmp_path / "test.csv").write_text("x,label\n1,a\n2,b\n")
    own = Table(str(tmp_path / "rows.csv"), "label", test_path=str(tmp_path / "test.csv"))
    with pytest.raises(ConfigError, match=r"data.test=25%: this data has a test split of its own"):
        cut(own, test=Duration(25, "percent"))


def test_the_loss_on_a_few_batches_falls(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("data=digits", "model=mlp", "augment=crop_flip", "data.overfit=2", "batch_size=16", "steps=60")
    assert train(*words, "epochs=null", "eval.every=30steps", "optimizer.lr=0.01", "run.dir=a") == 0
    out = capsys.readouterr().out
    assert "digits: 32 train, 32 val; overfit: train and val are the same few batches" in out
    first, last = (each["loss"] for each in records(Path("a")) if each.get("split") == "val")
    assert last < 0.1 * first or last < 0.01
    assert summary(Path("a"))["val"]["accuracy"] == 1


def test_folds_and_fractions_are_keys_of_the_call_in_python(in_tmp: Path) -> None:
    keys = {"data.folds": 4, "data.fold": 1, "data.fraction": "50%"}
    result = ptfast.train(data=Visits(), model="mlp", epochs=1, batch_size=5, **{"run.dir": "a", **keys})
    # 15 of the 30 samples that are not in the fold, in batches of 5.
    assert (result.summary["val"]["step"] if "step" in result.summary["val"] else result.best["step"]) == 3


def test_a_key_that_the_dataset_takes_itself_goes_to_it(in_tmp: Path) -> None:
    words = ("data=custom", "data._target_=test_cut_splits.Visits", "model=mlp", "epochs=1")
    assert read_config([*words, "data.split=train"])[1].data.target.kwargs == {"split": "train"}
    config = read_config([*words, "data.folds=5"])[1]
    assert (config.data.folds, config.data.split, config.data.target.kwargs) == (5, "auto", {})


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("data.folds=5", "data.fold=5"),
            "error[C005]: data.fold=5 (command line): folds are counted from 0 to 4",
        ),
        (("data.fold=0",), "error[C005]: data.fold=0 (command line): there are no folds"),
        (
            ("data.folds=5", "data.val=20%"),
            "error[C011]: data.val=20% (command line): contradicts data.folds=5",
        ),
        (
            ("data.split=grouped",),
            "error[C011]: data.split=grouped (command line): does not go with data.group=null",
        ),
        (("data.fraction=0.1",), "a share is 10%"),
        (("data.group=x", "data.split=auto"), "error[D005]: data.group=x (command line): is no column"),
        (("data.fraction=5samples",), "error[D006]: data.fraction=5samples (command line): keeps 5 of 1,617"),
    ],
)
def test_keys_that_do_not_fit_are_rejected_in_one_line(
    words: tuple[str, ...], line: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("data=digits", "model=mlp", "epochs=1", *words) in (2, 3)
    assert line in capsys.readouterr().err
