"""BatchNorm over several ranks: running statistics as one process would have them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ptfast.core.distributed import Ranks, broadcast_buffers, gathered
from ptfast.core.tensors.torch_internals import BatchNorm
from ptfast.techniques.parallel.sync_batchnorm import SyncedBatchNorm


class RunningStatistics:
    """BatchNorm's running statistics over several ranks: those of one process with all the micro-batches.

    A rank's own micro-batches take the statistics from r to r_k = keep_k r + part_k, where keep_k is
    (1 - momentum) ** batches. One process would run them one rank after the other; so, for each rank in
    order, merged <- keep_k merged + part_k. The ranks exchange r_k and the number of batches, once a
    step.

    Layers without a momentum, which average over all batches, take the first rank's statistics. Those of
    `SyncedBatchNorm` are the same everywhere already.

    Args:
        model: the plain model, on its device and restored.
        ranks: all of whom call `merge` after every step.

    Cost: one gather of all statistics a step and a few kernels; nothing for a model without BatchNorm.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        self._synced = [module for module in model.modules() if isinstance(module, SyncedBatchNorm)]
        self._norms = [
            module
            for module in model.modules()
            if isinstance(module, BatchNorm)
            and not isinstance(module, (SyncedBatchNorm, nn.SyncBatchNorm))
            and module.running_mean is not None
        ]
        moving = [norm for norm in self._norms if norm.momentum is not None]
        averaging = [norm for norm in self._norms if norm.momentum is None]
        self._averaging: list[Tensor] = [
            buffer for norm in averaging for buffer in norm.buffers(recurse=False)
        ]
        self._buffers: list[Any] = [b for norm in moving for b in (norm.running_mean, norm.running_var)]
        self._counters: list[Any] = [norm.num_batches_tracked for norm in moving]
        if moving:
            self._sizes = [buffer.numel() for buffer in self._buffers]
            self._statistics = torch.cat(self._buffers)
            self._counts = torch.stack(self._counters)
            device, repeats = self._counts.device, [2 * norm.num_features for norm in moving]
            self._owner = torch.arange(len(moving)).repeat_interleave(torch.tensor(repeats)).to(device)
            kept = torch.tensor(
                [1 - float(norm.momentum or 0) for norm in moving], dtype=self._statistics.dtype
            )
            self._kept = kept.to(device)[self._owner]

    @torch.no_grad()
    def merge(self) -> None:
        """Make of all ranks' statistics those of one process; call it once after every step."""
        broadcast_buffers(self._averaging, self._ranks)
        if not self._buffers:
            return
        own = torch.cat([*self._buffers, torch.stack(self._counters) - self._counts])
        by_rank = gathered(own, self._ranks.num_ranks)
        statistics, batches = by_rank.split([len(self._owner), len(self._counters)], dim=1)
        before = merged = self._statistics
        for moved, keep in zip(statistics, self._kept ** batches[:, self._owner], strict=True):
            merged = torch.addcmul(moved, keep, merged - before)
        self._statistics, self._counts = merged, self._counts + batches.sum(0).long()
        torch._foreach_copy_(self._buffers, list(merged.split(self._sizes)))
        torch._foreach_copy_(self._counters, list(self._counts.unbind()))

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Let a forward pass count for nothing, as that of an empty share's stand-in sample."""
        training = [norm for norm in self._norms if norm.training]
        for norm in training:
            norm.training = False
        for norm in self._synced:
            norm.counts = False
        try:
            yield
        finally:
            for norm in training:
                norm.training = True
            for norm in self._synced:
                norm.counts = True
