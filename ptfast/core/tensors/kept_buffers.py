"""Restoring a model's buffers, such as BatchNorm's statistics, after passes that must not change them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of `model` at the end of this context."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                # Backward may need unchanged buffers: leave them. BatchNorm does not count its writes.
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


class KeptBuffers:
    """Restores a model's saved buffers, such as BatchNorm's statistics, after a skipped step.

    Buffers that are not saved with the model are constants, or are computed again.

    Cost: two copies of these buffers a step, in a few kernels.
    """

    def __init__(self, model: nn.Module) -> None:
        saved = model.state_dict(keep_vars=True)
        names = (name for name, buffer in model.named_buffers() if name in saved and buffer.numel())
        split = (name.rpartition(".") for name in names)
        self._places = [(model.get_submodule(owner), name) for owner, _, name in split]
        self._kept: dict[torch.dtype, Tensor] = {}

    def keep(self) -> None:
        """Copy the buffers, before a step."""
        if self._places:
            self._kept = _flat(self._buffers())

    @torch.no_grad()
    def put_back(self, skipped: Tensor) -> None:
        """Restore the copies if `skipped`, a 0-d tensor on the device, is true."""
        buffers = self._buffers()
        for dtype, after in _flat(buffers).items():
            own = [buffer for buffer in buffers if buffer.dtype == dtype]
            parts = torch.where(skipped, self._kept[dtype], after).split([each.numel() for each in own])
            torch._foreach_copy_(own, [part.view_as(each) for part, each in zip(parts, own, strict=True)])

    def _buffers(self) -> list[Tensor]:
        return [getattr(module, name) for module, name in self._places]


def _flat(tensors: Sequence[Tensor]) -> dict[torch.dtype, Tensor]:
    """Concatenate all elements of each dtype: a copy."""
    kinds = dict.fromkeys(tensor.dtype for tensor in tensors)
    return {kind: torch.cat([t.reshape(-1) for t in tensors if t.dtype == kind]) for kind in kinds}
