"""Buffers of a model, such as BatchNorm's statistics, kept over passes that are not to count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """A context after which the buffers of `model` are as before."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                # A backward pass may need those that have not changed. BatchNorm does not count its writes.
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
