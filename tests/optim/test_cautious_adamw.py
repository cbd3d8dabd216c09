"""Cautious weight decay against AdamW's update, decayed weight by weight."""

from __future__ import annotations

import pytest
import torch
from optimizers import wave
from torch import nn

from ptfast.optim import layer_batches
from ptfast.optim.cautious_adamw import CautiousAdamW


@pytest.mark.parametrize("chunk_size", [layer_batches.CPU_CHUNK_SIZE, 7])
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_weights_decay_where_the_step_moves_them_towards_zero(
    weight_decay: float, buffered: bool, chunk_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam's update is what torch's AdamW without decay changes; the sign is that of this very change."""
    monkeypatch.setattr(layer_batches, "CPU_CHUNK_SIZE", chunk_size)
    if not buffered:  # as on a GPU
        no_buffers = lambda batch, shared: [(None, None)] * len(batch.pieces)  # noqa: E731
        monkeypatch.setattr(layer_batches.LayerBatch, "buffers", no_buffers)
    shapes, lr = [(5, 4), (3,), (2, 3, 2, 2)], 0.05
    layers = [nn.Parameter(wave(shape, phase)) for phase, shape in enumerate(shapes)]
    twins = [nn.Parameter(layer.detach().clone()) for layer in layers]
    cautious, plain = (
        CautiousAdamW(layers, lr=lr, weight_decay=weight_decay),
        torch.optim.AdamW(twins, lr=lr, weight_decay=0.0),
    )
    num_decayed = 0
    for step in range(5):
        for layer, twin in zip(layers, twins, strict=True):
            layer.grad = wave(tuple(layer.shape), 2 * step)
            twin.grad = layer.grad.clone()
        before = [twin.detach().clone() for twin in twins]
        cautious.step()
        plain.step()
        for old, twin in zip(before, twins, strict=True):
            towards_zero = (old - twin.detach()) * old >= 0
            num_decayed += int(towards_zero.sum())
            twin.data -= lr * weight_decay * torch.where(towards_zero, old, 0.0)
        torch.testing.assert_close(layers, twins)
    assert 0 < num_decayed < 5 * sum(layer.numel() for layer in layers)
