"""Steps that are left out leave statistics and averages alone; a state that is not finite is not saved."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from running import build_run, train
from torch import nn
from toys import Holed, Lines

from ptfast.core.protocols import Callback
from ptfast.optim.build_optimizer import start_momentum
from ptfast.run import Run
from ptfast.training.fit import fit
from ptfast.training.loop import updates

HERE = "test_skipped_statistics"
BAD = [1, 4, 5, 9]
"""The steps, counted from 1, whose samples are NaN."""
WORDS = (
    *("data=custom", "data._target_=toys.Holed", "batch_size=10", "dataloader=plain", "steps=12"),
    *("model=custom", f"model._target_={HERE}.Normed", "optimizer=sgd", "optimizer.lr=0.1"),
    *("schedule=constant", "log_every=2"),
)
FP16 = ("data.val=0", "precision=amp_fp16")
PLANT = f"{{_target_: toys.Plant, steps: {BAD}}}"


@pytest.fixture(autouse=True)
def _nothing_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Holed, "planted", False)


class Normed(nn.Module):
    """A BatchNorm behind a layer, and a saved mask that is not finite by intention."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, num_classes)
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(inputs)).relu())


@pytest.mark.parametrize("mode", ["stop", "skip"])
def test_a_step_that_fp16_leaves_out_changes_no_statistics(mode: str, tmp_path: Path) -> None:
    """Against torch's own scaler in a loop that takes the other steps."""
    run = build_run(
        tmp_path / "run", *WORDS, f"callbacks=[{PLANT}]", f"numerics={mode}", *FP16, "ema.decay=0.8"
    )
    run.logger = Lines()
    start = copy.deepcopy(run.model)
    assert fit(run) == "finished"
    assert run.progress.skipped_steps == len(BAD)
    model, scaler = start, torch.amp.GradScaler("cpu")
    batches = build_run(tmp_path / "plain", *WORDS, *FP16).train_loader.steps(0, 12)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    (group,), (given,) = optimizer.param_groups, run.optimizer.param_groups
    group.update({name: given[name] for name in ("momentum", "nesterov", "weight_decay")})
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8), use_buffers=True
    )
    for step, batch in enumerate(batches):
        scaler.scale(torch.ones(()))
        if step + 1 in BAD:
            scaler.update(scaler.get_scale() / 2)
            continue
        inputs, targets = batch.micro_batches[0].data
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(inputs).float(), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        average.update_parameters(model)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], value, rtol=1e-3, atol=1e-4)
    assert int(run.model.norm.num_batches_tracked) == 12 - len(BAD)
    assert run.ema is not None
    averages = run.ema.state_dict()["averages"]
    assert "mask" not in averages
    for name, value in averages.items():
        torch.testing.assert_close(value, average.module.state_dict()[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("decides", ["host", "device"])
def test_a_step_that_is_left_out_is_none_of_an_equal_average(
    decides: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if decides == "device":
        monkeypatch.setattr(updates, "READ_AT_ONCE", ())
    swa = ("data.val=0", "ema=swa", "ema.swa_start=0steps", "ema.swa_every=1steps", "numerics=skip")
    run = build_run(tmp_path, *WORDS, *swa, f"callbacks=[{PLANT},{{_target_: {HERE}.Weights}}]")
    run.logger = Lines()
    if decides == "device":
        start_momentum(run.optimizer)
    assert fit(run) == "finished"
    assert run.ema is not None
    state = run.ema.state_dict()
    assert state["updates"] == 12 - len(BAD)
    taken = [weight for step, weight in run.callbacks[1].seen if step not in BAD]
    torch.testing.assert_close(state["averages"]["last.weight"], torch.stack(taken).mean(0))


class Weights(Callback):
    """Notes a weight after every step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, torch.Tensor]] = []

    def on_step(self, run: Run, step: int) -> None:
        self.seen.append((step, run.model.last.weight.detach().clone()))


@pytest.mark.parametrize("name", ["norm.running_mean", "last.bias", "mask"])
def test_a_state_with_a_buffer_that_is_not_finite_is_not_saved(
    name: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil = f"callbacks=[{{_target_: {HERE}.Spoil, name: {name}}}]"
    words = ("data.val=10samples", "saving.every=4steps", "eval.every=12steps", "run.dir=a")
    code = train(*WORDS, *words, spoil)
    assert code == (0 if name == "mask" else 5)
    if code:
        assert "N001" in capsys.readouterr().err
        assert Path("a/saved/last").resolve().name == "step-8"


class Spoil(Callback):
    """Puts NaN into a tensor of the model after step 11."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_step(self, run: Run, step: int) -> None:
        if step == 11:
            run.model.state_dict()[self.name][0] = math.nan
