"""A task that takes its own steps, with an optimizer for each part of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from resuming import assert_same_run
from running import build_run, train, weights
from torch import Tensor, nn
from torch.nn.functional import softplus

from ptfast.core.errors import ConfigError
from ptfast.tasks.supervised import SupervisedTask

HERE = "test_own_steps"


class Net(nn.Module):
    """A generator of points and a critic of them."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
        self.critic = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.critic(inputs)


def turns(model: Any, real: Tensor, critic: Any, generator: Any) -> Tensor:
    """Two steps of the critic and one of the generator: the loss of the critic."""
    loss = torch.zeros(())
    for _ in range(2):
        fake = model.generator(torch.randn(len(real), 2))
        loss = softplus(-model.critic(real)).sum() + softplus(model.critic(fake.detach())).sum()
        critic.zero_grad()
        loss.backward()
        critic.step()
    softplus(-model.critic(model.generator(torch.randn(len(real), 2)))).sum().backward()
    generator.step()
    return loss


class Gan(SupervisedTask):
    def step(self, model: Any, data: Any, optimizers: dict[str, Any]) -> tuple[Tensor, int]:
        return turns(model, data[0], optimizers["critic"], optimizers["generator"]), len(data[0])

    def evaluate(self, model: Any, data: Any, metrics: Any) -> tuple[Tensor, int]:
        return softplus(-model(data[0])).sum(), len(data[0])


class Lossless(Gan):
    def step(self, model: Any, data: Any, optimizers: dict[str, Any]) -> Any:
        return None


NAMED = "optimizer.groups=[{match: 'critic*', name: critic, lr_scale: 2}, {match: 'gen*', name: generator}]"
WORDS = (
    *("data=custom", "data._target_=toys.blobs", "model=custom", f"model._target_={HERE}.Net"),
    *("batch_size=16", "log_every=2", "schedule=cosine", "schedule.warmup=0", "optimizer=adamw"),
    *("optimizer.lr=0.01", "data.val=10samples", "eval.every=2steps", NAMED),
)


def words(*more: str, task: str = "Gan") -> list[str]:
    return [*WORDS, f"task={HERE}.{task}", *more]


def test_steps_are_those_of_torchs_optimizers_by_hand(tmp_path: Path) -> None:
    assert train(*words("steps=4", f"run.dir={tmp_path}/run")) == 0
    run = build_run(tmp_path / "built", *words("steps=4"))
    model: Any = run.model
    groups = {name: getattr(model, name).parameters() for name in ("critic", "generator")}
    lrs = {"critic": 0.02, "generator": 0.01}
    optimizers = {name: torch.optim.AdamW(part, lr=lrs[name], fused=True) for name, part in groups.items()}
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 4) for each in optimizers.values()]
    for step, batch in enumerate(run.train_loader.steps(0, 4)):
        run.seed_step(step, 0)
        model.zero_grad()
        turns(model, batch.micro_batches[0].data[0], **optimizers)
        for schedule in schedules:
            schedule.step()
    for name, trained in weights(tmp_path / "run").items():
        torch.testing.assert_close(trained, model.state_dict()[name])


def test_a_resumed_run_is_one_never_stopped(tmp_path: Path) -> None:
    whole, parts = (f"run.dir={tmp_path}/{name}" for name in ("whole", "parts"))
    constant = "schedule=constant"
    assert train(*words("steps=6", whole, constant)) == 0
    assert (
        train(*words("steps=4", parts, constant))
        == train(*words("steps=6", parts, constant, "run.resume=auto"))
        == 0
    )
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        (["optimizer.groups=[]"], "C011", "steps optimizers by name, and none has generator.0.weight"),
        (["optimizer.groups=[{match: 'critic*', name: critic}]"], "C011", "none has generator.0.weight"),
        (
            ["optimizer.groups=[{match: 'critic*', name: d}, {match: '*', name: g}]"],
            "C005",
            "optimizer.groups.0.name=d: later entries or freezing leave it no parameter",
        ),
        (["optimizer.groups=[{match: 'd.*', name: d}]"], "C005", "matches no parameter"),
        (["task=classification"], "C011", "has no method step, which would take the optimizer generator"),
        (["gradients=clip"], "C011", "gradients.clip_norm: .*Set gradients.clip_norm=null"),
        (["gradients.clip_value=1"], "C011", "gradients.clip_value: .*Set gradients.clip_value=null"),
        (["gradients.accumulate=2"], "C011", "Set gradients.accumulate=1"),
    ],
)
def test_what_does_not_go_together_is_one_line(more: list[str], code: str, says: str, tmp_path: Path) -> None:
    given = {word.partition("=")[0]: word for word in words("steps=1", *more)}
    with pytest.raises(ConfigError, match=says) as caught:
        build_run(tmp_path / "run", *given.values())
    assert caught.value.code == code


def test_a_step_without_a_loss_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*words("steps=1", f"run.dir={tmp_path}/run", task="Lossless")) == 2
    assert f"error[C017]: task={HERE}.Lossless" in (said := capsys.readouterr().err)
    assert "step returns None, but must return the sum of its losses and their count" in said
