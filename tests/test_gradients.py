"""Clipping against torch's own functions, and that it leaves the host alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from ptfast.gradients import build_clipper


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
    clip = build_clipper(0.5, None, ours)
    assert clip is not None
    norm, expected = clip(), clip_grad_norm_(theirs, 0.5)
    assert norm is not None
    assert torch.equal(norm, expected)
    assert torch.equal(grads(ours), grads(theirs))
    assert grads(ours).norm() <= 0.5 + 1e-6


def test_short_gradients_are_left_alone():
    ours = parameters(0.001)
    before = grads(ours).clone()
    clip = build_clipper(10.0, None, ours)
    assert clip is not None
    clip()
    assert torch.equal(grads(ours), before)


def test_value_equals_torch():
    ours, theirs = parameters(), parameters()
    clip = build_clipper(None, 0.1, ours)
    assert clip is not None
    assert clip() is None
    clip_grad_value_(theirs, 0.1)
    assert torch.equal(grads(ours), grads(theirs))
    assert grads(ours).abs().max() <= 0.1


def test_both_clamp_first():
    ours, theirs = parameters(), parameters()
    clip = build_clipper(0.2, 0.1, ours)
    assert clip is not None
    clip_grad_value_(theirs, 0.1)
    expected = clip_grad_norm_(theirs, 0.2)
    norm = clip()
    assert norm is not None
    assert torch.equal(norm, expected)
    assert torch.equal(grads(ours), grads(theirs))


def test_off():
    assert build_clipper(None, None, parameters()) is None


def test_missing_and_frozen_gradients():
    some = parameters()
    some[0].grad = None
    frozen = some[1].requires_grad_(False)
    assert frozen.grad is not None
    before = frozen.grad.clone()
    clip = build_clipper(0.1, None, some)
    assert clip is not None
    clip()
    assert torch.equal(frozen.grad, before)
    for parameter in some:
        parameter.grad = None
    assert clip() == 0


def test_a_norm_that_is_not_finite_reaches_the_caller():
    some = parameters()
    some[0].grad = torch.full_like(some[0], torch.nan)
    clip = build_clipper(1.0, None, some)
    assert clip is not None
    norm = clip()
    assert norm is not None
    assert norm.isnan()


@pytest.mark.gpu
def test_no_host_synchronisation_on_cuda():
    some = [nn.Parameter(p.detach().cuda()) for p in parameters()]
    for parameter in some:
        parameter.grad = torch.ones_like(parameter)
    clip = build_clipper(0.5, None, some)
    assert clip is not None
    clip()
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm = clip()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert norm is not None
    assert norm.is_cuda
