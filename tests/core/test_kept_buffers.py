"""Buffers that are kept over passes that are not to count."""

from __future__ import annotations

import torch
from torch import nn

from ptfast.core.tensors.kept_buffers import buffers_kept


def test_statistics_of_a_pass_are_taken_back() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    model(torch.randn(8, 3))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with buffers_kept(model):
        model(torch.randn(8, 3) + 5)
        assert not torch.equal(model[0].running_mean, before["0.running_mean"])
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_what_a_backward_pass_needs_is_left_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3).eval(), nn.Linear(3, 2))
    outputs = model(torch.randn(8, 3))
    with buffers_kept(model):
        model(torch.randn(8, 3))
    outputs.sum().backward()
    assert model[0].weight.grad is not None
