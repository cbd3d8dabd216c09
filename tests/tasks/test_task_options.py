"""Options of the task in the config: short form, checks against the signature, and the way to the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from running import build_run, train
from torch import Tensor, nn

from ptfast.cli.command_line import run
from ptfast.config.compose import compose
from ptfast.config.files.frozen import freeze
from ptfast.config.overrides import parse
from ptfast.config.read import load_config, read_config
from ptfast.core.errors import ConfigError
from ptfast.core.protocols import DataInfo
from ptfast.core.sections.targets import built
from ptfast.tasks import build_task, collate_of
from ptfast.tasks.classification import Classification

HERE = "test_task_options"


def half_loss(outputs: Tensor, targets: Tensor, scale: float = 0.5) -> Tensor:
    """Mean loss of a user."""
    return scale * F.cross_entropy(outputs, targets)


class MyTask(Classification):
    """A task of a user."""

    def __init__(self, facts: DataInfo, temperature: float = 1.0) -> None:
        super().__init__(facts)
        self.temperature = temperature

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().loss_sum(outputs / self.temperature, targets)


def task_of(*words: str) -> tuple[str, dict[str, Any]]:
    config = read_config(words)[1]
    return config.task.name, built(config.task.options)


@pytest.mark.parametrize(
    ("words", "name", "options"),
    [
        ((), "auto", {}),
        (("task=regression",), "regression", {}),
        (("task.name=regression",), "regression", {}),
        (
            ("task=classification", "task.label_smoothing=0.1"),
            "classification",
            {"label_smoothing": 0.1},
        ),
        (
            ("task.label_smoothing=0.1", "task.name=classification"),
            "classification",
            {"label_smoothing": 0.1},
        ),
        (("task.label_smoothing=0",), "auto", {"label_smoothing": 0.0}),
        (("task={name: classification, label_smoothing: 0.2}",), "classification", {"label_smoothing": 0.2}),
        ((f"task={HERE}.MyTask", "task.temperature=2"), f"{HERE}.MyTask", {"temperature": 2.0}),
        ((f"task._target_={HERE}.MyTask", "task.temperature=2"), f"{HERE}.MyTask", {"temperature": 2.0}),
        ((f"task={{_target_: {HERE}.MyTask, temperature: 2}}",), f"{HERE}.MyTask", {"temperature": 2.0}),
        (("recipe=./mine.yaml", "task.temperature=3"), f"{HERE}.MyTask", {"temperature": 3.0}),
    ],
)
def test_a_task_is_a_name_with_options(
    words: tuple[str, ...], name: str, options: dict[str, Any], in_tmp: Path
) -> None:
    Path("mine.yaml").write_text(f"task: {{_target_: {HERE}.MyTask, temperature: 2}}")
    assert task_of(*words) == (name, options)


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        (("task=clasification",), "C003", "task=clasification (command line): unknown task. Did you mean"),
        (
            ("task=classification", "task.label_smothing=0.1"),
            "C002",
            "task.label_smothing=0.1 (command line): unknown key. Did you mean task.label_smoothing?",
        ),
        (("task.label_smothing=0.1",), "C002", "Did you mean task.label_smoothing?"),
        (("task=regression", "task.label_smoothing=0.1"), "C002", "task.label_smoothing=0.1 (command line)"),
        (("task.nam=regression",), "C002", "Did you mean task.name?"),
        (("task.info=3",), "C002", "task.info=3"),
        (("task.label_smoothing=1",), "C005", "task.label_smoothing=1 (command line): must be at least 0"),
        (("task.label_smoothing=much",), "C004", "expected a number"),
        (("task.name=[1]",), "C004", "expected the name or import path of a task"),
        (("task.loss=3",), "C004", "task.loss=3 (command line): expected an import path"),
        (("task.loss=torch.nn.CrossEntropyLos",), "C009", "Did you mean torch.nn.CrossEntropyLoss?"),
        (("task.loss._target_=torch.nn.CrossEntropyLoss", "task.loss.weigt=1"), "C002", "task.loss.weight"),
        ((f"task={HERE}.MyTask", "task.temprature=2"), "C002", "Did you mean task.temperature?"),
        ((f"task={HERE}.YourTask",), "C009", f"Did you mean {HERE}.MyTask?"),
        ((f"task._target_={HERE}.YourTask",), "C009", f"Did you mean {HERE}.MyTask?"),
        (("data.collate=3",), "C004", "data.collate=3 (command line): expected an import path"),
        ((f"data.collate={HERE}.half_los",), "C009", f"Did you mean {HERE}.half_loss?"),
        (
            (f"data.collate._target_={HERE}.half_loss", "data.collate.scle=1"),
            "C002",
            "Did you mean data.collate.scale?",
        ),
        (("task=classification", "task.name=regression"), "C006", "given twice"),
    ],
)
def test_options_are_checked_against_the_task(words: tuple[str, ...], code: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(words)
    assert caught.value.code == code
    assert what in str(caught.value)


def test_a_task_that_collates_needs_nothing_but_the_samples() -> None:
    class Collating(MyTask):
        def collate(self, samples: list[Any]) -> Any:
            return samples

    globals()["Collating"] = Collating
    with pytest.raises(ConfigError, match=r"not a static method.* Write @staticmethod above it"):
        collate_of(f"{HERE}.Collating")
    assert collate_of("classification") is collate_of("auto") is collate_of(f"{HERE}.MyTask") is None


def test_options_that_no_task_of_the_data_takes_are_refused_when_it_is_known() -> None:
    with pytest.raises(ConfigError, match="the task multilabel takes no such option") as caught:
        build_task("auto", DataInfo("features", "multilabel", num_classes=2), label_smoothing=0.1)
    assert (caught.value.code, caught.value.key) == ("C002", "task.label_smoothing")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("task.label_smoothing=0.3",), lambda o, t: F.cross_entropy(o, t, label_smoothing=0.3)),
        ((f"task.loss={HERE}.half_loss",), lambda o, t: half_loss(o, t)),
        ((f"task.loss._target_={HERE}.half_loss", "task.loss.scale=3"), lambda o, t: half_loss(o, t, 3)),
        (
            ("task.loss._target_=torch.nn.CrossEntropyLoss", "task.loss.label_smoothing=0.2"),
            nn.CrossEntropyLoss(label_smoothing=0.2),
        ),
        (("task.loss=torch.nn.functional.cross_entropy",), F.cross_entropy),
        ((f"task={HERE}.MyTask", "task.temperature=2"), lambda o, t: F.cross_entropy(o / 2, t)),
    ],
)
def test_the_options_reach_the_loss(tmp_path: Path, words: tuple[str, ...], expected: Any) -> None:
    run = build_run(tmp_path, *words, "model.hidden=[4]", "steps=1", "batch_size=32")
    ((data, _),) = next(run.train_loader.steps(0, 1)).micro_batches
    with torch.no_grad():
        loss, count = run.task.loss(run.model, data)
        torch.testing.assert_close(loss / count, expected(run.model(data[0]), data[1]))


def test_a_frozen_task_is_read_back_the_same(in_tmp: Path) -> None:
    words = ["task=classification", f"task.loss._target_={HERE}.half_loss", "task.loss.scale=3"]
    words += ["task.label_smoothing=0.1"]
    composed, config = read_config(words)
    freeze(composed, Path("config.yaml"))
    again, read = load_config(Path("config.yaml"), trusted=True)
    assert read.task == config.task
    assert again.tree["task"] == composed.tree["task"]
    _, changed = load_config(Path("config.yaml"), ["task.loss.scale=4"], trusted=True)
    assert changed.task.options["loss"].kwargs == {"scale": 4.0}


def test_a_file_may_use_the_short_form(in_tmp: Path) -> None:
    Path("mine.yaml").write_text("task: classification\nepochs: 1\n")
    assert task_of("recipe=./mine.yaml", "task.label_smoothing=0.1") == (
        "classification",
        {"label_smoothing": 0.1},
    )
    Path("mine.yaml").write_text("task: {name: regression, label_smoothing: 0.1}\nepochs: 1\n")
    with pytest.raises(ConfigError, match=r"task.label_smoothing=0.1 \(.*mine.yaml:1\)"):
        read_config(["recipe=./mine.yaml", "task=regression"])
    freeze(compose(["task=classification"]), Path("whole.yaml"))
    text = Path("whole.yaml").read_text().replace("task:\n  name: classification", "task: classification")
    Path("whole.yaml").write_text(text)
    assert "task: classification" in text
    _, config = load_config(Path("whole.yaml"), ["task.label_smoothing=0.1"])
    assert (config.task.name, config.task.options) == ("classification", {"label_smoothing": 0.1})


def test_what_a_file_from_elsewhere_names_must_be_trusted(in_tmp: Path) -> None:
    for word in (f"task={HERE}.MyTask", f"task.loss={HERE}.half_loss"):
        freeze(compose([word]), Path("config.yaml"))
        with pytest.raises(ConfigError, match="not trusted") as caught:
            load_config(Path("config.yaml"))
        assert caught.value.code == "C009"
        load_config(Path("config.yaml"), [f"trust=[{HERE}]"])


def test_a_sweep_goes_over_names_and_options() -> None:
    names, smoothing = parse(["task=classification,hf", "task.label_smoothing=0,0.1"], sweep=True)
    points = [[names.at(name), smoothing.at("0")] for name in names.values]
    assert [read_config(point)[1].task.name for point in points[:1]] == ["classification"]
    assert points[1] == ["++task.name=hf", "++task.label_smoothing=0"]


def test_training_with_a_loss_of_ones_own(in_tmp: Path) -> None:
    words = ("steps=3", "model.hidden=[4]", "run.dir=run", f"task.loss._target_={HERE}.half_loss")
    assert train(*words) == 0
    assert run(["eval", "run"]) == 0
