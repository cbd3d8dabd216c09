"""Evaluation measures the same samples each time, and says so where a model's outputs are unsteady."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from running import build_run, records, train
from torch.nn import functional as F
from toys import blobs
from unsteady import Linear

from ptfast.cli import command_line
from ptfast.core.durations import Duration
from ptfast.data.loaders import build_loaders
from ptfast.data.sampling.splits import SplitRules
from ptfast.training import evaluate
from ptfast.training.evaluate import TtaModel
from ptfast.training.loop.step import Trainer

STILL = (
    *("data=custom", "data._target_=toys.blobs", "data.val=10", "data.normalize=false", "model=custom"),
    *("optimizer=sgd", "optimizer.lr=1e-12", "optimizer.momentum=0", "optimizer.nesterov=false"),
    *("optimizer.weight_decay=0", "schedule=constant", "schedule.warmup=0", "batch_size=20", "epochs=3"),
    *("device=cpu", "eval.batch_size=4", "run.dir=r"),
)
"""Weights hardly move, so each evaluation gives the same loss."""


def losses(folder: str = "r") -> list[float]:
    return [record["loss"] for record in records(Path(folder)) if record["split"] == "val"]


def everything_said(capsys: pytest.CaptureFixture[str]) -> str:
    return "".join(capsys.readouterr())


def held_out() -> tuple[torch.Tensor, torch.Tensor]:
    data = blobs()
    places = torch.from_numpy(
        SplitRules().apply(len(data), Duration(10, "samples"), 0, data.tensors[1].numpy())["val"]
    )
    return data.tensors[0][places], data.tensors[1][places]


@pytest.mark.parametrize("model", ["InPlace", "InPlaceUnseen"])
@pytest.mark.parametrize("cached", [True, False])
def test_a_model_that_writes_to_its_inputs_is_evaluated_on_the_same_samples(
    model: str,
    cached: bool,
    in_tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ema=ema` evaluates twice at a time."""
    if not cached:
        monkeypatch.setattr(build_loaders, "CACHE_LIMIT_BYTES", 0)
    assert train(*STILL, f"model._target_=unsteady.{model}", "ema=ema") == 0
    inputs, targets = held_out()
    right = F.cross_entropy(Linear()((inputs - 0.1) / 0.5), targets).item()
    assert losses() == pytest.approx([right] * 3, abs=1e-6)
    assert [r["raw_loss"] for r in records(Path("r")) if r["split"] == "val"] == pytest.approx([right] * 3)


def test_a_loss_that_writes_to_the_targets_is_given_the_same_ones(in_tmp: Path) -> None:
    assert train(*STILL, "model._target_=unsteady.Linear", "task.loss._target_=unsteady.loss_in_place") == 0
    inputs, targets = held_out()
    right = F.cross_entropy(Linear()(inputs), 1 - targets).item()
    assert losses() == pytest.approx([right] * 3, abs=1e-6)


def test_a_model_may_begin_to_write_to_its_inputs(in_tmp: Path) -> None:
    assert train(*STILL, "model._target_=unsteady.InPlaceLate") == 0
    inputs, targets = held_out()
    changed = F.cross_entropy(Linear()(inputs - 0.1), targets).item()
    assert losses()[-1] == pytest.approx(changed, abs=1e-6)


def test_views_of_an_image_are_made_before_a_model_writes_to_it() -> None:
    class Writes(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images.mul_(2).sum((1, 2, 3))

    images = torch.randn(2, 1, 6, 6)
    for flip, shift in ((True, 0), (True, 1), (False, 2)):
        views = TtaModel(Writes(), flip=flip, shift=shift)(images.clone())
        plain = TtaModel(_Doubled(), flip=flip, shift=shift)(images.clone())
        assert torch.equal(views, plain)


class _Doubled(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (images * 2).sum((1, 2, 3))


def test_the_step_that_warms_up_leaves_its_batch_as_it_is(in_tmp: Path) -> None:
    run = build_run(in_tmp / "r", *STILL, "model._target_=unsteady.InPlace")
    trainer = Trainer(run)
    run.compilation = SimpleNamespace()  # type: ignore[assignment] # a model that is compiled
    batches = list(run.train_loader.steps(0, 2))
    before = batches[0].micro_batches[0].data[0].clone()
    after = next(trainer.warm_up(iter(batches)))
    assert torch.equal(after.micro_batches[0].data[0], before)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            "AlwaysDropout",
            "returns different outputs for the same inputs in evaluation. F.dropout needs training=",
        ),
        (
            "OfBatch",
            "returns different outputs for a sample alone and in a batch. Use BatchNorm with running",
        ),
        ("Linear", None),
    ],
)
def test_unsteady_outputs_are_warned_of_once_and_change_nothing(
    model: str,
    says: str | None,
    in_tmp: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = (*STILL, f"model._target_=unsteady.{model}", "optimizer.lr=0.1", "eval.batch_size=5")
    assert train(*words) == 0
    said = everything_said(capsys)
    assert said.count("returns different outputs") == (says is not None)
    assert says is None or f"warning: model: unsteady.{model} {says}" in said
    monkeypatch.setattr(evaluate, "checking_outputs", lambda forward, run: forward)
    assert train(*words, "run.dir=unchecked") == 0
    assert records(Path("r")) == records(Path("unchecked"))
    one, other = (torch.load(Path(name, "saved/last/model.pt")) for name in ("r", "unchecked"))
    assert all(torch.equal(one[name], other[name]) for name in one), "buffers included"


@pytest.mark.parametrize("model", ["AlwaysDropout", "OfBatch"])
def test_an_export_of_unsteady_outputs_is_rejected(
    model: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*STILL, f"model._target_=unsteady.{model}") == 0
    assert command_line.run(["eval", "r"]) == 0
    assert f"warning: model: unsteady.{model} returns different outputs" in everything_said(capsys)
    assert command_line.run(["export", "r", "--out", "e"]) == 5
    assert "error[N003]: model._target_=unsteady." in everything_said(capsys)
    assert not Path("e").exists()


def test_an_export_of_a_model_that_writes_to_its_inputs_is_compared_on_the_same_ones(in_tmp: Path) -> None:
    assert train(*STILL, "model._target_=unsteady.InPlace") == 0
    assert command_line.run(["export", "r", "--out", "e"]) == 0
