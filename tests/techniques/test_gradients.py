"""Clipping against torch's own functions, and that it leaves the host alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from running import build_run, records, same_bits, train, training_state
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from ptfast.techniques.gradients import Gradients
from ptfast.techniques.gradients.clipping import (
    GradientSteps,
    build_clipper,
    clip_adaptively,
    global_norm,
    head_of,
)
from ptfast.training.fit import fit


def parameters(scale: float = 1.0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), (2, 3, 1, 1), ())]
    for parameter in made:
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
    return made


def grads(of: list[nn.Parameter]) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in of if p.grad is not None])


@pytest.mark.parametrize("scale", [0.001, 1.0, 1e6])
def test_norm_equals_torch(scale):
    ours, theirs = parameters(scale), parameters(scale)
    clip = build_clipper(Gradients(clip_norm=0.5), ours)
    assert clip is not None
    norm, expected = clip(), clip_grad_norm_(theirs, 0.5)
    assert norm is not None
    assert torch.equal(norm, expected)
    assert torch.equal(grads(ours), grads(theirs))
    assert grads(ours).norm() <= 0.5 + 1e-6


def test_short_gradients_are_left_alone():
    ours = parameters(0.001)
    before = grads(ours).clone()
    clip = build_clipper(Gradients(clip_norm=10.0), ours)
    assert clip is not None
    clip()
    assert torch.equal(grads(ours), before)


def test_value_equals_torch():
    ours, theirs = parameters(), parameters()
    clip = build_clipper(Gradients(clip_value=0.1), ours)
    assert clip is not None
    assert clip() is None
    clip_grad_value_(theirs, 0.1)
    assert torch.equal(grads(ours), grads(theirs))
    assert grads(ours).abs().max() <= 0.1


def test_both_clamp_first():
    ours, theirs = parameters(), parameters()
    clip = build_clipper(Gradients(clip_norm=0.2, clip_value=0.1), ours)
    assert clip is not None
    clip_grad_value_(theirs, 0.1)
    expected = clip_grad_norm_(theirs, 0.2)
    norm = clip()
    assert norm is not None
    assert torch.equal(norm, expected)
    assert torch.equal(grads(ours), grads(theirs))


def test_off():
    assert build_clipper(Gradients(), parameters()) is None


def test_missing_and_frozen_gradients():
    some = parameters()
    some[0].grad = None
    frozen = some[1].requires_grad_(False)
    assert frozen.grad is not None
    before = frozen.grad.clone()
    clip = build_clipper(Gradients(clip_norm=0.1), some)
    assert clip is not None
    clip()
    assert torch.equal(frozen.grad, before)
    for parameter in some:
        parameter.grad = None
    assert clip() == 0


def test_a_norm_that_is_not_finite_reaches_the_caller():
    some = parameters()
    some[0].grad = torch.full_like(some[0], torch.nan)
    clip = build_clipper(Gradients(clip_norm=1.0), some)
    assert clip is not None
    norm = clip()
    assert norm is not None
    assert norm.isnan()


@pytest.mark.parametrize("scale", [1e-6, 0.1, 10.0])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_adaptive_equals_timm(scale: float, memory_format: torch.memory_format) -> None:
    timm = pytest.importorskip("timm.utils.agc")
    generator = torch.Generator().manual_seed(1)
    shapes = ((5,), (3, 4), (2, 3, 4, 4), (7, 2), ())
    ours = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    ours[1].data[1] = 0.0
    ours[2].data = ours[2].data.contiguous(memory_format=memory_format)
    for p in ours:
        p.grad = scale * torch.randn(p.shape, generator=generator).contiguous(
            memory_format=memory_format if p.ndim == 4 else torch.contiguous_format
        )
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    for p, q in zip(ours, theirs, strict=True):
        assert p.grad is not None
        q.grad = p.grad.clone()
    before = grads(ours)
    clip = build_clipper(Gradients(clip_adaptive=0.02), ours)
    assert clip is not None
    clip()
    timm.adaptive_clip_grad(theirs, 0.02)
    torch.testing.assert_close(grads(ours), grads(theirs))
    assert torch.equal(grads(ours), before) is (scale == 1e-6)


def test_adaptive_without_gradients_and_with_infinite_ones() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    clip_adaptively([weight], 0.01)
    weight.grad = torch.tensor([[torch.inf, 0, 0], [1, 1, 1]])
    clip_adaptively([weight], 0.01)
    # What is not finite stays so for the gradient scaler; the other unit is clipped to 0.01 of its weights.
    assert weight.grad[0, 0].isnan()
    assert weight.grad[1].norm() == pytest.approx(0.01 * weight[1].norm().item())


def test_the_head_is_spared() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    assert [id(p) for p in head_of(model)] == [id(p) for p in model[2].parameters()]
    assert head_of(nn.BatchNorm1d(3)) == []
    tied = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False))
    tied[2].weight = tied[0].weight
    assert [id(p) for p in head_of(tied)] == [id(tied[0].weight)]
    for p in model.parameters():
        p.grad = torch.full_like(p, 100.0)
    clip = build_clipper(Gradients(clip_adaptive=0.01), model.parameters(), head=head_of(model))
    assert clip is not None
    clip()
    long = [bool((p.grad == 100).all()) for p in model.parameters() if p.grad is not None]
    assert long == [False, False, False, False, True, True]


def test_none_and_zero_give_the_same_bits(in_tmp: Path) -> None:
    """With zeros, every parameter is added to; with none, one without a gradient is passed over."""
    words = ("model.hidden=[8]", "steps=5", "log_every=5", "batch_size=128", "optimizer=sgd_cifar")
    run, other = (build_run(in_tmp / name, *words, "gradients.accumulate=2") for name in "ab")
    fit(run)
    optimizer, model = other.optimizer, other.model
    factors = other.schedule.lr_factors(0, 5)
    for factor, batch in zip(factors, other.train_loader.steps(0, 5), strict=True):
        optimizer.zero_grad(set_to_none=False)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        for data, _ in batch.micro_batches:
            loss, _ = other.task.loss(model, data)
            loss.backward(torch.tensor(1 / batch.num_samples))
        optimizer.step()
    assert same_bits(run.model.state_dict(), model.state_dict())


class Unused(nn.Module):
    """Has a layer that it never calls."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(64, num_classes), nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs.flatten(1))


def test_parameters_without_a_gradient_are_named_once(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("model=custom", f"model._target_={__name__}.Unused", "steps=6", "log_every=2", "run.dir=a")
    assert train(*words) == 0
    shown = capsys.readouterr().out
    assert shown.count("spare.bias, spare.weight get no gradient") == 1
    assert train("model.hidden=[4]", "steps=2", "run.dir=b") == 0
    assert "no gradient" not in capsys.readouterr().out


@pytest.mark.parametrize("clipping", ["", "gradients.clip_norm=0.01"])
def test_the_norm_is_logged_as_it_was_before_clipping(in_tmp: Path, clipping: str) -> None:
    words = ["model.hidden=[4]", "steps=6", "log_every=3", "batch_size=256", *filter(None, [clipping])]
    run = build_run(in_tmp / "built", *words, "gradients.accumulate=2")
    (batch,) = list(run.train_loader.steps(0, 1))
    inputs = torch.cat([data[0] for data, _ in batch.micro_batches])
    targets = torch.cat([data[1] for data, _ in batch.micro_batches])
    nn.functional.cross_entropy(run.model(inputs), targets).backward()
    expected = torch.stack([p.grad.norm() for p in run.model.parameters() if p.grad is not None]).norm()
    assert train(*words, "gradients.accumulate=2", "log_every=1", "run.dir=a") == 0
    norms = [line["grad_norm"] for line in records(Path("a")) if line["split"] == "train"]
    assert norms[0] == pytest.approx(expected.item(), rel=1e-5)
    assert len(norms) == 6
    assert train(*words, "gradients.log_norm=false", "run.dir=b") == 0
    assert not any("grad_norm" in line for line in records(Path("b")))


@pytest.mark.gpu
def test_no_host_synchronisation_on_cuda(no_waits):
    some = [nn.Parameter(p.detach().cuda()) for p in parameters()]
    for parameter in some:
        parameter.grad = torch.ones_like(parameter)
    clip = build_clipper(Gradients(clip_norm=0.5), some)
    assert clip is not None
    clip()
    with no_waits():
        norm = clip()
    assert norm is not None
    assert norm.is_cuda


class MeanNorm:
    """A technique with state: the mean norm of all gradients so far."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.total, self.steps = parameters, torch.zeros(()), 0

    def __call__(self) -> None:
        self.total += global_norm([p.grad for p in self.parameters if p.grad is not None])
        self.steps += 1

    def log_values(self) -> dict[str, float]:
        return {"mean_norm": self.total.item() / self.steps}

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total.clone(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.steps = state["total"].clone(), state["steps"]


def test_what_acts_on_gradients_is_saved_and_logged_if_it_has_a_state(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(gradients: Gradients, given: Any, **options: Any) -> GradientSteps:
        given = [*given]
        second = MeanNorm(given[:1])
        second.log_values = dict  # pyright: ignore[reportAttributeAccessIssue]
        steps = [MeanNorm(given), second]
        return GradientSteps([*steps, *(build_clipper(gradients, given, **options) or ())])

    monkeypatch.setattr("ptfast.training.stages.optimizer_stage.build_clipper", build)
    words = ("model=mlp", "model.hidden=[8]", "log_every=1steps", "gradients.clip_norm=0.1", "steps=6")
    assert train(*words, "run.dir=whole") == 0
    assert train(*words, "run.dir=a", "saving.every=3steps", "saving.keep=9") == 0
    assert train(*words, "run.dir=b", "run.resume=a/saved/step-3") == 0
    means = {
        name: [line["mean_norm"] for line in records(Path(name)) if line["split"] == "train"]
        for name in ("whole", "b")
    }
    assert means["b"][-3:] == means["whole"][-3:]
    assert len({*means["whole"]}) == 6
    # Two of one class are saved apart.
    both = [training_state(Path("b"))[name]["total"] for name in ("MeanNorm", "MeanNorm#2")]
    assert both[0] > both[1] > 0
    assert both == [training_state(Path("whole"))[name]["total"] for name in ("MeanNorm", "MeanNorm#2")]
