"""Schedule-free optimizers: their own average is evaluated, and looking at it changes no bit of the run."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from config_trees import refused
from running import build_run, same_bits, summary, train, training_state, weights

from ptfast.techniques.ema.weight_averages import ScheduleFree
from ptfast.training.fit import fit

pytest.importorskip("schedulefree")
CONSTANT = ("schedule=constant", "schedule.warmup=5steps", "model.hidden=[16]", "batch_size=128")
RUN = (*CONSTANT, "epochs=2", "saving.keep=9")


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_what_is_evaluated_is_what_the_optimizer_puts_in(name: str, tmp_path: Path) -> None:
    run = build_run(tmp_path / "run", *CONSTANT, f"optimizer={name}_schedulefree", "steps=8")
    fit(run)
    assert isinstance(run.ema, ScheduleFree)
    run.ema.finalize()
    before = copy.deepcopy(run.model.state_dict())
    with run.ema.swapped():
        evaluated = copy.deepcopy(run.model.state_dict())
    assert same_bits(before, dict(run.model.state_dict()))
    run.optimizer.eval()  # pyright: ignore[reportAttributeAccessIssue]
    assert same_bits(evaluated, dict(run.model.state_dict()))
    assert not same_bits(evaluated, before)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_evaluating_and_resuming_change_no_bit(name: str, in_tmp: Path) -> None:
    words = (*RUN, f"optimizer={name}_schedulefree")
    assert train(*words, "run.dir=seldom", "eval.every=2epochs", "saving.every=2epochs") == 0
    assert train(*words, "run.dir=often", "eval.every=2steps", "saving.every=7steps") == 0
    resumed = ("run.dir=resumed", "run.resume=often/saved/step-14")
    assert train(*words, *resumed, "eval.every=5steps", "saving.every=7steps") == 0
    for other in ("often", "resumed"):
        assert same_bits(weights(Path("seldom")), weights(Path(other)))
        assert str(training_state(Path("seldom"))) == str(training_state(Path(other)))
    assert summary(Path("seldom"))["val"] == summary(Path("resumed"))["val"]


def test_batchnorm_is_measured_under_the_average(tmp_path: Path) -> None:
    model = ("model=resnet_digits", "model.width=4", "schedule=constant", "optimizer=adamw_schedulefree")
    run = build_run(tmp_path / "run", *model, "steps=6")
    fit(run)
    assert run.ema is not None
    assert run.ema.note == "schedule-free, by the optimizer, BatchNorm measured"
    run.ema.finalize()
    names = [name for name in run.model.state_dict() if name.endswith("running_mean")]
    trained = {name: run.model.state_dict()[name].clone() for name in names}
    with run.ema.swapped():
        assert not any(torch.equal(run.model.state_dict()[name], trained[name]) for name in names)
    assert all(torch.equal(run.model.state_dict()[name], trained[name]) for name in names)


def test_what_it_takes_the_place_of_is_refused() -> None:
    optimizer = {"_target_": "schedulefree.AdamWScheduleFree"}
    constant = {"_target_": "ptfast.techniques.schedule.lr_schedules.Constant"}
    assert refused(optimizer=optimizer).key == "schedule"
    assert refused(optimizer=optimizer, schedule=constant, ema={"decay": 0.9}).key == "ema"
    assert refused(optimizer=optimizer, schedule=constant, parallel={"strategy": "fsdp"}).key == "optimizer"
