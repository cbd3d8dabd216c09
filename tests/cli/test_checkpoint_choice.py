"""Which checkpoint of a run is evaluated, predicted with, exported and started from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import records, summary, train, weights
from safetensors.torch import load_file

from ptfast.cli.command_line import run
from ptfast.core.errors import PtfastError
from ptfast.core.tensors.checkpoint_folders import find_checkpoint

WORDS = ("recipe=resnet_digits", "model=mlp", "epochs=null", "steps=9", "batch_size=32")
# The highest loss is the best: that of the first evaluation.
FIRST_IS_BEST = (
    "eval.every=3steps",
    "saving.every=3steps",
    "saving.keep=9",
    "stop.metric=loss",
    "stop.mode=max",
)
CHOICES = [
    ((), 3, "best by val loss, step 3"),
    (("--checkpoint", "best"), 3, "best by val loss, step 3"),
    (("--checkpoint", "last"), 9, "last, step 9"),
    (("--checkpoint", "step-6"), 6, "step 6"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("choice") / "run"
    assert train(*WORDS, *FIRST_IS_BEST, f"run.dir={folder}") == 0
    assert summary(folder)["best"]["step"] == 3
    return folder


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(("words", "step", "label"), CHOICES)
def test_the_best_checkpoint_is_used_unless_another_is_named(
    words: tuple[str, ...],
    step: int,
    label: str,
    trained: Path,
    in_tmp: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wanted = weights(trained, f"step-{step}")
    (logged,) = [each for each in records(trained) if (each["split"], each["step"]) == ("val", step)]
    assert run(["eval", str(trained), *words]) == 0
    told = capsys.readouterr()
    assert rows(told.out)[0]["loss"] == logged["loss"]
    assert told.err == f"ptfast: {label}\n"

    np.save("some.npy", np.random.default_rng(0).integers(0, 16, (4, 8, 8), np.uint8))
    assert run(["predict", str(trained), "some.npy", *words]) == 0
    told = capsys.readouterr()
    assert f"ptfast: {label}\n" in told.err
    assert run(["predict", str(trained / f"saved/step-{step}"), "some.npy"]) == 0
    assert capsys.readouterr().out == told.out

    assert run(["export", str(trained), "--out", "e", "--weights-only", *words]) == 0
    assert f"ptfast: {label}\n" in capsys.readouterr().err
    assert all(torch.equal(value, wanted[name]) for name, value in load_file("e/model.safetensors").items())
    assert run(["predict", "e", "some.npy"]) == 0
    told_of_export = capsys.readouterr()
    assert told_of_export.out == told.out
    assert f"ptfast: {label}\n" in told_of_export.err, "an export says which checkpoint it was made of"


def test_a_run_starts_from_the_best_weights_of_another_and_says_so(
    trained: Path, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*WORDS, f"model.weights={trained}", "steps=1", "optimizer.lr=1e-30", "run.dir=warm") == 0
    assert "(best by val loss, step 3)" in " ".join(capsys.readouterr().out.split())
    first, best = weights(Path("warm")), weights(trained, "best")
    assert all(torch.equal(first[name], best[name]) for name in best if "running" not in name)


def test_a_run_without_a_best_checkpoint_stands_for_its_last(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*WORDS, "steps=2", "saving.best=0", "run.dir=r") == 0
    capsys.readouterr()
    assert run(["eval", "r"]) == 0
    assert capsys.readouterr().err == "ptfast: last, step 2\n"


def test_a_run_without_held_out_data_is_best_by_its_training_loss(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*WORDS, "steps=2", "data.val=0", "run.dir=r") == 0
    capsys.readouterr()
    np.save("some.npy", np.zeros((1, 8, 8), np.uint8))
    assert run(["predict", "r", "some.npy"]) == 0
    assert "ptfast: best by train loss, step 2\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("where", "name", "code", "hint"),
    [
        ("", "step-7", "S004", "There are: step-9, step-6, step-3"),
        ("", "bets", "C005", "Use best, last or step-N"),
        ("saved/step-6", "last", "C011", "Give the run directory"),
        ("../nowhere", "best", "S004", "Give a run directory"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_rejected(
    where: str, name: str, code: str, hint: str, trained: Path
) -> None:
    with pytest.raises(PtfastError, match=hint) as caught:
        find_checkpoint(trained / where, name)
    assert caught.value.code == code
    assert find_checkpoint(trained / "saved", "step-6") == find_checkpoint(trained / "saved/step-6", "best")
