"""Several evaluation sets by name, beside the validation split."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bad_data import image
from refusals import assert_refused, train_once
from resuming import arm, assert_same_run
from running import build_run, records, summary, train
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import ptfast
from ptfast.cli import command_line
from ptfast.training.fit import evaluate_splits
from ptfast.training.saved_model import saved_run

Capture = pytest.CaptureFixture[str]
BASE = ("data=arrays", "data.path=a.npz", "data.val=40samples", "evals.shifted.path=b.npz")
BASE = (*BASE, "+evals.noisy.path=c.npz", "model.hidden=[8]", "batch_size=32", "epochs=2", "seed=1")
EMA = (*BASE, "ema=ema", "ema.decay=0.9", "stop.metric=shifted/accuracy", "logger=csv", "log_every=2steps")


def save(folder: Path) -> None:
    """Three classes of points; `b` is shifted and lacks the last class, `c` is noisier."""
    for name, size, classes, shift, noise in (("a", 200, 3, 0, 1), ("b", 37, 2, 1, 1), ("c", 30, 3, 0, 3)):
        draw, labels = np.random.default_rng(size), np.arange(size) % classes
        points = draw.normal(0, noise, (size, 4)) + 2 * np.eye(4)[labels] + shift
        np.savez(folder / f"{name}.npz", x=points.astype(np.float32), y=labels)


@pytest.fixture
def arrays(in_tmp: Path) -> Path:
    save(in_tmp)
    return in_tmp


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with two evaluation sets, whose best is by one of them."""
    folder = tmp_path_factory.mktemp("evals")
    save(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train(*EMA, "run.dir=run") == 0
    return folder / "run"


def by_hand(path: Path, statistics: dict[str, list[float]], model: Any) -> dict[str, float]:
    """Loss and accuracy over all of a file, in plain torch."""
    with np.load(path) as arrays:
        inputs, targets = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
    mean, std = (torch.tensor(statistics[name]) for name in ("mean", "std"))
    with torch.no_grad():
        outputs = model((inputs - mean) / std)
    hits = (outputs.argmax(1) == targets).double().mean()
    return {"loss": float(F.cross_entropy(outputs, targets)), "accuracy": float(hits)}


def test_figures_are_those_of_plain_torch(run: Path) -> None:
    with saved_run(run, checkpoint="last") as saved:
        assert saved.ema is not None
        saved.ema.copy_to_model()
        for name, file in (("shifted", "b.npz"), ("noisy", "c.npz")):
            expected = by_hand(run.parent / file, saved.info.extra["normalize"], saved.model)
            found = summary(run)["evals"][name]
            assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-6)
            assert "raw_accuracy" in found


def test_each_set_is_evaluated_with_val_and_logged(run: Path) -> None:
    lines = [(line["step"], line["split"]) for line in records(run) if line["split"] != "train"]
    assert lines == [(step, split) for step in (5, 10) for split in ("val", "shifted", "noisy")]
    with (run / "metrics.csv").open() as file:
        assert {row["split"] for row in csv.DictReader(file)} >= {"shifted", "noisy"}
    page = (run / "report.html").read_text()
    assert re.findall(r"<td>(shifted|noisy)\b", page) == ["shifted", "noisy"]
    assert "<th>shifted/accuracy" not in page


def test_best_follows_a_set(run: Path) -> None:
    found = summary(run)
    assert found["best_metric"] == "shifted.accuracy"
    steps = {line["step"]: line["accuracy"] for line in records(run) if line["split"] == "shifted"}
    assert found["best"]["shifted/accuracy"] == max(steps.values())
    assert found["best"]["step"] == max(steps, key=lambda step: (steps[step], -step))


def test_eval_gives_every_set_and_the_figures_of_training(
    run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    assert command_line.run(["eval", "run", "--checkpoint", "last"]) == 0
    out, err = capsys.readouterr()
    found = {line["split"]: line for line in map(json.loads, out.splitlines())}
    logged = {line["split"]: line for line in records(run)}
    assert list(found) == ["val", "shifted", "noisy"]
    for name, line in found.items():
        assert {**line, "epoch": 2.0} == logged[name]
    assert "evals.shifted: arrays: 37 val" in err
    assert command_line.run(["eval", "run", "--split", "noisy"]) == 0
    assert json.loads(capsys.readouterr().out)["split"] == "noisy"
    assert command_line.run(["eval", "run", "evals.shifted.path=c.npz", "--split", "shifted"]) == 0
    assert "evals.shifted: arrays: 30 val" in capsys.readouterr().err
    assert command_line.run(["compare", "run", "--metric", "shifted.accuracy"]) == 0


def test_a_stopped_run_goes_on_to_the_same_bits_and_figures(arrays: Path) -> None:
    words = (
        *EMA,
        "saving.every=3steps",
        "callbacks=[{_target_: resuming.Armed, step: 7}]",
        "run.resume=auto",
    )
    assert train(*words, "run.dir=whole") == 0
    arm("SIGTERM")
    assert train(*words, "run.dir=a") == 75
    assert train(*words, "run.dir=a") == 0
    assert_same_run(arrays / "whole", arrays / "a")
    assert summary(arrays / "whole")["evals"] == summary(arrays / "a")["evals"]


def test_training_stops_by_a_set(arrays: Path) -> None:
    words = (*BASE, "stop.metric=noisy/accuracy", "stop.mode=min", "stop.patience=1", "epochs=9")
    assert train(*words, "run.dir=run") == 0
    found = [line["accuracy"] for line in records(arrays / "run") if line["split"] == "noisy"]
    rises = [step for step in range(1, len(found)) if found[step] >= min(found[:step])]
    assert summary(arrays / "run")["status"] == "stopped"
    assert rises == [len(found) - 1]


def test_sets_change_nothing_else(arrays: Path) -> None:
    assert train(*BASE, "run.dir=with") == 0
    assert train(*BASE[:3], *BASE[5:], "run.dir=without") == 0
    without = records(arrays / "without")
    assert [line for line in records(arrays / "with") if line["split"] in ("train", "val")] == without


def test_a_set_of_fewer_classes_is_matched_by_name(in_tmp: Path, capsys: Capture) -> None:
    draw_folders()
    words = ("data=imagefolder", "data.root=a", "data.val=0", "evals.few.root=few", "model.hidden=[4]")
    out, err = train_once(*words, "epochs=1", "batch_size=8", "run.dir=run", capsys=capsys)
    assert "evals.few: imagefolder: 8 val; classes are matched by name" in out
    assert (out + err).count("few has no sample of class bat, which train has") == 1
    loaded = build_run(in_tmp / "built", *words).eval_loaders["few"]
    assert torch.cat([batch.data[1] for batch in loaded]).bincount(minlength=3).tolist() == [0, 4, 4]


def draw_folders() -> None:
    for root, names in (("a", ("bat", "cat", "dog")), ("few", ("cat", "dog")), ("odd", ("cat", "fox"))):
        for name in names:
            for number in range(4):
                image(Path(root, name, f"{number}.png"))


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["evals.odd.root=odd"], "D003", ("evals.odd (command line): its classes differ", "has fox")),
        (["evals.x.root=none"], "D001", ("evals.x.root=none (command line): no such folder",)),
        (["evals.x.data=digits"], "D003", ("evals.x (command line): its classes differ",)),
        (["evals.x.rot=odd"], "C002", ("Did you mean evals.x.root?",)),
        (["evals.x.normalize=false"], "C002", ("evals.x.normalize=false (command line): unknown key",)),
        (["evals.test.root=odd"], "C013", ("evals.test (command line)", "that of a split")),
        (["evals.x.data=digit"], "C003", ("Did you mean data=digits?",)),
        (["evals.x=[1]"], "C004", ("evals.x=[1] (command line)",)),
        (["evals.few.root=few", "stop.metric=few/acc"], "C005", ("loss, accuracy, few/loss, few/accuracy",)),
        (["evals.few.root=few", "stop.metric=fw/accuracy"], "C005", ("unknown metric",)),
    ],
)
def test_what_cannot_be_an_evaluation_set_is_rejected(
    words: list[str], code: str, says: tuple[str, ...], in_tmp: Path, capsys: Capture
) -> None:
    draw_folders()
    words = ["data=imagefolder", "data.root=a", "data.val=3samples", *words, "run.root=runs"]
    if code == "C005":
        with pytest.raises(ptfast.PtfastError) as caught:
            build_run(in_tmp / "run", *words)
        assert all(text in str(caught.value) for text in says)
    else:
        assert_refused(["train", *words], code, says, capsys)


def test_keys_are_inherited_unless_a_set_lies_elsewhere_or_is_of_another_kind(arrays: Path) -> None:
    Path("t.csv").write_text("x,y\n" + "\n".join(f"{n},{n % 2}" for n in range(40)))
    for name in ("v", "other"):
        Path(f"{name}.csv").write_text("x,y\n1,0\n2,1\n3,0")
    words = ("data=table", "data.path=t.csv", "data.target=y", "data.val_path=v.csv", "model.hidden=[4]")
    built = build_run(
        arrays / "run", *words, "evals.other.path=other.csv", "evals.again={}", "evals.t.path=t.csv"
    )
    sizes = {name: sum(batch.num_samples for batch in loader) for name, loader in built.eval_loaders.items()}
    assert sizes == {"val": 3, "other": 3, "again": 3, "t": 40}


def test_sets_are_handed_over_in_python(arrays: Path, capsys: Capture) -> None:
    with np.load("a.npz") as found:
        inputs, labels = torch.from_numpy(found["x"]), torch.from_numpy(found["y"])
    data = TensorDataset(inputs, labels)
    evals = {"same": TensorDataset(inputs[:30] + 1, labels[:30]), "file": {"data": "arrays", "path": "b.npz"}}
    keys: dict[str, Any] = {"model.hidden": [4], "run.dir": "run"}
    result = ptfast.train(data=data, evals=evals, epochs=1, batch_size=32, **keys)
    assert set(result.summary["evals"]) == {"same", "file"}
    figures = ptfast.evaluate(result)
    assert figures["file"] == result.summary["evals"]["file"]
    assert "evals.same: TensorDataset: 30 val" in capsys.readouterr().out


def test_two_ranks_give_the_figures_of_one(two_ranks: dict[str, Any], tmp_path: Path) -> None:
    alone = build_run(tmp_path, *ranked(Path(two_ranks["folder"])))
    evaluate_splits(alone, ["shifted", "noisy"])
    assert alone.metrics.keys() == {"shifted", "noisy"}
    for name, figures in alone.metrics.items():
        assert two_ranks["test_evaluation_sets"][name] == pytest.approx(figures, rel=1e-6)


def ranked(folder: Path) -> tuple[str, ...]:
    """The words of a run with evaluation sets in `folder`."""
    return (
        *("data=arrays", f"data.path={folder}/a.npz", "data.val=40samples", "model.hidden=[8]", "steps=2"),
        *("batch_size=32", f"evals.shifted.path={folder}/b.npz", f"evals.noisy.path={folder}/c.npz"),
    )


def cases(ranks: Any) -> dict[str, dict[str, float]]:
    """The figures of each evaluation set, on one of several ranks."""
    folder = Path.cwd()
    if ranks.is_first:
        save(folder)
    torch.distributed.barrier()
    built = build_run(folder / "evaluation-sets", *ranked(folder), "parallel=ddp", ranks=ranks)
    evaluate_splits(built, ["shifted", "noisy"])
    return built.metrics
