"""Metrics of torchmetrics beside those of a task: figures, and what is kept and drawn as a table or curve."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from running import records, summary, train
from torch import Tensor
from torchmetrics import ExplainedVariance, MetricCollection, R2Score
from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassF1Score, MulticlassRecall

from ptfast.cli.command_line import run
from ptfast.config.checks.target_checks import check_target
from ptfast.core.errors import ConfigError
from ptfast.core.protocols import DataInfo
from ptfast.core.run_directory import read_json
from ptfast.core.sections.targets import Target, parse_target
from ptfast.tasks import build_task
from ptfast.tasks.added_metrics import Added, MetricTable, add_metrics, with_tables
from ptfast.tasks.ratios import placed

HERE = "test_added_metrics"

SCORES = "torchmetrics.classification"
CLASSES = DataInfo(kind="features", task="classification", num_classes=3)


def metrics_of(info: DataInfo, **trees: dict[str, Any]) -> Added:
    targets: dict[str, Target] = {}
    for name, tree in trees.items():
        targets[name], problems = check_target(parse_target(tree), "metrics", prefix=f"metrics.{name}")
        assert problems == []
    found = add_metrics(build_task("auto", info), targets, info).metrics()
    assert isinstance(found, Added)
    return found


def test_figures_are_numbers_and_all_else_a_table() -> None:
    from torchmetrics import functional

    torch.manual_seed(0)
    outputs, targets = torch.randn(50, 3), torch.randint(0, 3, (50,))
    metrics = metrics_of(
        CLASSES,
        f1={"_target_": f"{SCORES}.MulticlassF1Score", "average": "macro"},
        by_task={"_target_": "torchmetrics.Accuracy", "average": "none"},
        confusion={"_target_": f"{SCORES}.MulticlassConfusionMatrix"},
        roc={"_target_": f"{SCORES}.MulticlassROC", "thresholds": 5},
        both={
            "_target_": "torchmetrics.MetricCollection",
            "metrics": [
                {"_target_": f"{SCORES}.MulticlassRecall"},
                {"_target_": f"{SCORES}.MulticlassPrecision"},
            ],
        },
    ).to("cpu")
    names = ["accuracy", "f1", "by_task", "confusion", "roc", "MulticlassRecall", "MulticlassPrecision"]
    assert sorted(metrics.keys()) == sorted(names)
    for part in (slice(0, 30), slice(30, 50)):
        metrics.update(outputs[part].bfloat16(), targets[part])
    values = metrics.compute()
    scores = functional.classification
    rounded = outputs.bfloat16().float()
    assert values["f1"] == scores.multiclass_f1_score(rounded, targets, 3, "macro")
    assert {name for name, value in values.items() if isinstance(value, MetricTable)} == {
        "by_task",
        "confusion",
        "roc",
    }
    kind, matrix = values["confusion"]
    assert kind == "MulticlassConfusionMatrix"
    assert torch.equal(matrix, scores.multiclass_confusion_matrix(rounded, targets, 3))
    assert values["roc"].value[0].shape == (3, 5)


def test_labels_of_several_classes_are_given_as_whole_numbers() -> None:
    from torchmetrics.functional.classification import multilabel_auroc

    outputs, targets = torch.randn(8, 3), torch.eye(3).repeat(3, 1)[:8]
    several = DataInfo(kind="features", task="multilabel", num_classes=3)
    metrics = metrics_of(several, labels={"_target_": f"{SCORES}.MultilabelAUROC"}).to("cpu")
    metrics.update(outputs, targets)
    assert metrics.compute()["labels"] == multilabel_auroc(outputs, targets.long(), 3)


def test_outputs_come_in_the_shape_that_metrics_take() -> None:
    taken: list[tuple[Any, ...]] = []

    class Shapes:
        def update(self, outputs: Tensor, targets: Tensor) -> None:
            taken.append((outputs.dtype, tuple(outputs.shape), tuple(targets.shape)))

    class Own:
        def update(self, *given: Any) -> None: ...

    metrics = Added(Own(), {"shapes": Shapes()})  # type: ignore[arg-type]
    metrics.update(torch.zeros(2, 5, 7, dtype=torch.bfloat16), torch.zeros(2, 5, dtype=torch.long))
    metrics.update(torch.zeros(4, 1), torch.zeros(4))
    metrics.update(torch.zeros(2, 3, 8, 8), torch.zeros(2, 8, 8, dtype=torch.long))
    assert taken == [
        (torch.float32, (10, 7), (10,)),
        (torch.float64, (4,), (4,)),  # targets are numbers
        (torch.float32, (2, 3, 8, 8), (2, 8, 8)),
    ]


def test_metrics_of_numbers_are_those_of_float64() -> None:
    targets = torch.linspace(-311_031, -311_029, 200)
    outputs = targets + torch.linspace(-0.5, 0.7, 200).sin()
    wide, goal = outputs.double(), targets.double()
    info = DataInfo("features", "regression")
    names = ("R2Score", "ExplainedVariance", "MeanSquaredError")
    added = {name.lower(): {"_target_": f"torchmetrics.{name}"} for name in names}
    errors = {"errors": {"_target_": f"{HERE}.error_of_mean"}}
    task: Any = build_task("auto", info)
    for metrics in (metrics_of(info, **added, **errors), MetricCollection([R2Score(), ExplainedVariance()])):
        metrics = placed(metrics, torch.device("cpu"))
        for part in (slice(0, 150), slice(150, 200)):
            task.evaluate(lambda inputs, part=part: outputs[part], (None, targets[part]), metrics)
        values = {name.lower(): float(value) for name, value in metrics.compute().items()}
        explained = 1 - float((goal - wide).var(correction=0) / goal.var(correction=0))
        assert values["r2score"] == pytest.approx(
            1 - float((goal - wide).square().sum() / (goal - goal.mean()).square().sum()), rel=1e-3
        )
        assert values["explainedvariance"] == pytest.approx(explained, rel=1e-3)
        if "errors" in values:
            assert values["mae"] == pytest.approx(float((goal - wide).abs().mean()), rel=1e-12)
            assert values["meansquarederror"] == pytest.approx(
                float((goal - wide).square().mean()), rel=1e-12
            )


def error_of_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    """A metric with float32 numbers of its own, which take no others."""
    return (outputs[:, None] @ torch.ones(1, 1))[:, 0] - targets


def test_what_a_task_of_ones_own_measures_is_kept_as_well() -> None:
    from torchmetrics import MetricCollection

    metrics: Any = MetricCollection(
        {
            "wrong": MulticlassConfusionMatrix(3),
            "recall": MulticlassRecall(3, average="none"),
            "f1": MulticlassF1Score(3),
        }
    )
    metrics.update(torch.eye(3), torch.arange(3))
    given = with_tables(metrics)
    assert (given["f1"], given["recall"].kind) == (1.0, "MulticlassRecall")
    assert given["wrong"].kind == "MulticlassConfusionMatrix"
    assert torch.equal(given["wrong"].value, torch.eye(3, dtype=torch.long))


def test_a_run_logs_figures_and_keeps_and_draws_the_rest(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    added = (
        f"metrics={{f1: {SCORES}.MulticlassF1Score, confusion: {SCORES}.MulticlassConfusionMatrix,"
        f" curve: {{_target_: {SCORES}.MulticlassPrecisionRecallCurve, thresholds: 9}},"
        f" recall: {{_target_: {SCORES}.MulticlassRecall, average: none}}}}"
    )
    assert train("model.hidden=[16]", "steps=2", added, "stop.metric=f1", "run.dir=run") == 0
    figures = summary(Path("run"))["val"]
    assert set(figures) == {"loss", "accuracy", "f1"}
    assert all(
        isinstance(value, (int, float, str)) for record in records(Path("run")) for value in record.values()
    )
    kept = read_json(Path("run/metrics/val.json"))
    assert (kept["step"], kept["split"], set(kept["metrics"])) == (2, "val", {"confusion", "curve", "recall"})
    matrix = kept["metrics"]["confusion"]["values"]
    right, count = sum(matrix[i][i] for i in range(10)), sum(map(sum, matrix))
    assert right / count == pytest.approx(figures["accuracy"])
    assert re.search(r"^  report +run/report.html$", capsys.readouterr().out, re.MULTILINE)
    page = Path("run/report.html").read_text()
    assert "Metrics of val at step 2" in page
    assert page.count("<td style=") == 100
    assert page.count('class="square"') == 1
    assert "precision</text>" in page
    assert run(["eval", "run"]) == 0
    assert json.loads(capsys.readouterr().out)["confusion"] == matrix


def test_a_figure_for_each_class_is_not_followed_beyond_the_first_step(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_class = f"metrics.f1={{_target_: {SCORES}.MulticlassF1Score, average: none}}"
    assert train("model.hidden=[16]", "epochs=9", by_class, "stop.metric=f1", "run.dir=run") == 2
    line = capsys.readouterr().err
    assert (
        "error[C005]: stop.metric=f1 (command line): is not a single number: MulticlassF1Score returns"
        in line
    )
    assert "Follow loss or accuracy" in line
    assert not Path("run/metrics.jsonl").exists()


def shares(outputs: Tensor, targets: Tensor, rank: int = 1) -> tuple[Tensor, int]:
    """Outputs of which the target is among the `rank` largest, and how many there are."""
    return (outputs.topk(rank).indices == targets[:, None]).sum(), len(targets)


def test_a_function_is_a_metric() -> None:
    metrics = metrics_of(
        CLASSES,
        ratio={"_target_": f"{__name__}.shares", "rank": 2},
        each={"_target_": "torch.nn.functional.cross_entropy", "reduction": "none"},
        mean={"_target_": "torchmetrics.functional.accuracy"},
    ).to("cpu")
    torch.manual_seed(0)
    outputs, targets = torch.randn(50, 3), torch.randint(0, 3, (50,))
    for part in (slice(0, 30), slice(30, 50)):
        metrics.update(outputs[part], targets[part])
    values = metrics.compute()
    assert set(metrics.keys()) == {"accuracy", "ratio", "each", "mean"} == set(values)
    assert values["ratio"] == pytest.approx(float((outputs.argmin(1) != targets).double().mean()))
    assert values["each"] == pytest.approx(float(torch.nn.functional.cross_entropy(outputs, targets)))
    assert values["mean"] == pytest.approx(float(values["accuracy"]))


def test_a_figure_of_the_task_is_not_replaced() -> None:
    with pytest.raises(ConfigError) as refused:
        metrics_of(CLASSES, accuracy={"_target_": f"{SCORES}.MulticlassAccuracy", "average": "none"})
    assert (refused.value.code, refused.value.key) == ("C011", "metrics.accuracy")
    assert str(refused.value).endswith("Give it another name, such as metrics.own_accuracy.")


@pytest.mark.parametrize(
    ("tree", "code", "what"),
    [
        ({"_target_": "torch.nn.Linear"}, "C009", "is not a metric"),
        (
            {"_target_": f"{SCORES}.MulticlassF1Score", "averge": "macro"},
            "C017",
            "constructor raises ValueError",
        ),
        ({"_target_": f"{SCORES}.BinaryAccuracy"}, "C017", "update raises"),
    ],
)
def test_one_that_does_not_fit_is_named(tree: dict[str, Any], code: str, what: str) -> None:
    _, problems = check_target(parse_target(tree), "metrics", prefix="metrics.own")
    errors = list(problems)
    try:
        metrics_of(CLASSES, own=tree).update(torch.randn(5, 3), torch.randint(0, 3, (5,)))
    except (ConfigError, AssertionError) as error:
        errors.append(error)  # type: ignore[arg-type]
    assert errors[0].code == code
    assert str(errors[0]).startswith("metrics.own._target_=")
    assert what in str(errors[0])
