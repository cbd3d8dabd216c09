"""Weights of classes: read by number or name, balanced by the training data, and rejected."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loss_cases import CASES, masks
from running import build_run

from ptfast.cli.command_line import run
from ptfast.core.auto_choices import read_choices
from ptfast.core.errors import ConfigError
from ptfast.core.protocols import DataInfo
from ptfast.data.map_source import TensorSource
from ptfast.tasks import build_task
from ptfast.tasks.cross_entropy import balanced_weights, read_weights

INFO = DataInfo("features", "classification", 3, ("cat", "dog", "eel"))


def test_weights_by_name_leave_the_other_classes_at_1() -> None:
    assert read_weights({"eel": 3}, INFO, "task.class_weights").tolist() == [1, 1, 3]
    numbered = DataInfo("features", "classification", 3)
    assert read_weights({0: 2.0, "2": 0}, numbered, "task.class_weights").tolist() == [2, 1, 0]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("weights", "what"),
    [
        ({"cot": 2.0}, "there is no class cot. Did you mean cat?"),
        ([1.0, 2.0], "2 weights, where the data has 3 classes"),
        ([0.0, 0.0, 0.0], "every weight is 0"),
        ([1.0, -1.0, 1.0], "finite numbers of at least 0"),
        ([1.0, math.nan, 1.0], "finite numbers of at least 0"),
    ],
)
@pytest.mark.parametrize("key", ["class_weights", "pos_weight"])
def test_weights_that_do_not_fit_the_classes_are_rejected(weights: Any, what: str, key: str) -> None:
    task = "classification" if key == "class_weights" else "multilabel"
    with pytest.raises(ConfigError, match="|".join([what.replace("?", r"\?")])) as caught:
        build_task(task, INFO, **{key: weights})
    assert (caught.value.code, caught.value.key) == ("C005", f"task.{key}")


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        ("task.class_weights=[-1,1,1]", "C005", "must be at least 0"),
        ("task.class_weights=[.nan,1,1]", "C005", "must be a finite number"),
        ("task.class_weights=balance", "C004", "Did you mean balanced?"),
        ("task=regression task.class_weights=balanced", "C002", "unknown key"),
        ("task.pos_weight=balanced", "C002", "Did you mean task.class_weights?"),
        (
            "task.focal_gamma=2 task.label_smoothing=0.1",
            "C011",
            "cannot be combined with label_smoothing",
        ),
        (
            "task.class_weights=balanced task.loss=torch.nn.CrossEntropyLoss",
            "C011",
            "changes the loss that task.loss replaces",
        ),
        ("task.focal_gamma=-1", "C005", "must be at least 0"),
    ],
)
def test_options_that_contradict_each_other_are_rejected(
    words: str, code: str, what: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "steps=2", "model.hidden=[4]", "run.dir=run", *words.split()]) == 2
    error = capsys.readouterr().err
    assert f"error[{code}]: task." in error
    assert what in error
    assert not Path("run").exists()


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    labels = np.random.default_rng(0).choice(3, 301, p=[0.7, 0.2, 0.1])
    labels[::50] = -100
    counts = np.bincount(labels[labels >= 0])
    expected = counts.sum() / (3 * counts)  # as `compute_class_weight("balanced", ...)` documents it
    source = TensorSource(torch.zeros(301, 2), torch.from_numpy(labels))
    assert balanced_weights(source, 3, -100) == pytest.approx(expected, rel=1e-12)


def test_pixels_are_counted_and_a_class_that_never_occurs_weighs_0() -> None:
    targets = masks(ignored=True).tensors[1]
    counts = targets[targets >= 0].bincount().double()
    source = TensorSource(torch.zeros(30, 2), targets)
    found = balanced_weights(source, 3, -100)
    assert found == pytest.approx([*(counts.sum() / (2 * counts)).tolist(), 0], rel=1e-12)


def test_labels_that_are_not_known_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    source = TensorSource(torch.zeros(700, 2), torch.arange(700) % 7 // 3)
    known = balanced_weights(source, 3, -100)
    monkeypatch.setattr(TensorSource, "known_labels", lambda self: None)
    assert balanced_weights(source, 3, -100) == known


def test_balanced_weights_are_recorded_and_resumed(tmp_path: Path) -> None:
    words = (*CASES["class weights, balanced"].run_words()[:-1], "task.class_weights=balanced")
    built = build_run(tmp_path, *words)
    recorded = read_choices(tmp_path)["task.class_weights"].value
    assert recorded == pytest.approx([30 / 3 / count for count in (20, 7, 3)])
    assert built.task.class_weights.tolist() == pytest.approx(recorded)  # type: ignore[attr-defined]
    built.choices.choose("task.class_weights", [1.0, 2.0, 3.0])
    built.choices.write(tmp_path)
    assert build_run(tmp_path, *words).task.class_weights.tolist() == [1, 2, 3]  # type: ignore[attr-defined]


def test_tokens_weigh_as_their_classes() -> None:
    weights = [0.1, 1.0, 10.0]
    task: Any = build_task("token_classification", INFO, class_weights=weights)
    outputs, targets = torch.randn(4, 5, 3), torch.randint(0, 3, (4, 5))
    targets[0, 2:] = -100
    loss, weight = task.loss(lambda inputs: outputs, (None, targets))
    plain = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), torch.tensor(weights))
    torch.testing.assert_close(loss / weight.float(), plain, rtol=1e-6, atol=0)


def test_the_focal_loss_of_a_certain_target_has_a_gradient() -> None:
    task: Any = build_task("classification", INFO, focal_gamma=0.5)
    outputs = torch.tensor([[200.0, 0.0, 0.0], [0.0, 1.0, 0.0]], requires_grad=True)
    task.loss_sum(outputs, torch.tensor([0, -100])).backward()
    assert outputs.grad is not None
    assert outputs.grad.isfinite().all()
