"""Steps that are equal on any number of ranks: gradients and BatchNorm's statistics in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ptfast.core.distributed import Ranks, broadcast_buffers, gathered, host_sums
from ptfast.core.tensors.torch_internals import BatchNorm


class PartialSum(NamedTuple):
    """The gradients of micro-batches `start` to `start + size`, summed; `size` is a power of two."""

    start: int
    size: int
    gradients: list[Tensor]


def add_partial_sum(parts: list[PartialSum], part: PartialSum) -> None:
    """Append `part`, and join neighbors that are halves of a larger part, as long as there are any."""
    parts.append(part)
    while len(parts) > 1 and parts[-2].size == parts[-1].size and parts[-2].start % (2 * part.size) == 0:
        right, left = parts.pop(), parts.pop()
        if left.gradients:
            torch._foreach_add_(left.gradients, right.gradients)
        part = PartialSum(left.start, 2 * left.size, left.gradients)
        parts.append(part)


def total(parts: list[PartialSum]) -> list[Tensor]:
    """Return the sum of all parts, which together cover each micro-batch once, from the last to the first."""
    while len(parts) > 1:
        right = parts.pop()
        torch._foreach_add_(parts[-1].gradients, right.gradients)
    return parts.pop().gradients


class OrderedSums(nn.Module):
    """A model whose steps give the same bits on any number of ranks that share its micro-batches evenly.

    The gradients of neighboring micro-batches are added, then those of neighboring pairs, and so on. Each
    rank joins its own parts first, then adds up one slice of all ranks' parts and sends it to all.

    Cost: as many bytes as all-reduce if the number k of micro-batches per rank is a power of two, otherwise
    up to log2(k) times as many, all sent after backward; memory for log2(k) + 4 gradients of the model.
    """

    compression = None

    def __init__(self, model: nn.Module, ranks: Ranks, micro_batches: int) -> None:
        super().__init__()
        self.module, self._ranks = model, ranks
        self._summed = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._by_type: dict[torch.dtype, list[int]] = {}
        for index, parameter in enumerate(self._summed):
            self._by_type.setdefault(parameter.dtype, []).append(index)
        share = micro_batches // ranks.world_size
        self._reached = [0] * len(self._summed)
        """Whether each parameter has had a gradient in this step."""
        self._sum_over_hosts = host_sums(ranks.world_size)
        self._parts: list[PartialSum] = []
        self._layouts: list[list[PartialSum]] = []
        """The parts that each rank has after its last micro-batch, without their gradients."""
        for rank in range(ranks.world_size):
            self._layouts.append([])
            for index in range(rank * share, (rank + 1) * share):
                add_partial_sum(self._layouts[-1], PartialSum(index, 1, []))
        self._statistics = OrderedStatistics(model, ranks)
        broadcast_buffers([each.detach() for each in (*model.parameters(), *model.buffers())], ranks)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return self.module(*inputs, **keywords)

    def check_gradients(self) -> None:
        """Do nothing: a parameter without a gradient has none on any rank."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run the micro-batches of a step inside this context; it ends with the sums over all ranks."""
        self._parts.clear()
        self._reached = [0] * len(self._summed)
        with self._statistics.step():
            yield
        self._finish()

    def keep(self, index: int) -> None:
        """Add the gradients and statistics of micro-batch `index` of the step, in order."""
        self._reached = [
            before | (p.grad is not None) for before, p in zip(self._reached, self._summed, strict=True)
        ]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._summed]
        for parameter in self._summed:
            parameter.grad = None
        add_partial_sum(self._parts, PartialSum(index, 1, gradients))
        self._statistics.keep()

    @torch.no_grad()
    def _finish(self) -> None:
        reached_on_ranks = self._sum_over_hosts(self._reached)
        if self._ranks.world_size == 1:
            for parameter, gradient in zip(self._summed, total(self._parts), strict=True):
                parameter.grad = gradient
        else:
            for indices in self._by_type.values():
                self._exchange(indices)
            self._parts.clear()
        # No sample has used the others: weight decay and momentum must not move them.
        for parameter, reached in zip(self._summed, reached_on_ranks(), strict=True):
            if not reached:
                parameter.grad = None

    def _exchange(self, indices: list[int]) -> None:
        """Sum the gradients of some parameters, all of one type, over all ranks."""
        world_size, parameters = self._ranks.world_size, [self._summed[index] for index in indices]
        sizes = [parameter.numel() for parameter in parameters]
        length = -(-sum(sizes) // world_size)
        padding = parameters[0].new_zeros(length * world_size - sum(sizes))
        own = [torch.cat([*(part.gradients[i].flatten() for i in indices), padding]) for part in self._parts]
        slices = torch.stack(own).view(len(own), world_size, length).transpose(0, 1).flatten()
        counts = [len(layout) * length for layout in self._layouts]
        received = slices.new_empty(sum(counts))
        torch.distributed.all_to_all_single(received, slices, counts, [len(own) * length] * world_size)
        rows = received.view(-1, length)
        parts: list[PartialSum] = []
        for part, row in zip(chain.from_iterable(self._layouts), rows, strict=True):
            add_partial_sum(parts, part._replace(gradients=[row]))
        flat = gathered(total(parts)[0], world_size).flatten()
        for parameter, summed in zip(parameters, flat[: sum(sizes)].split(sizes), strict=True):
            # Use separate memory, in the parameter's order as on one rank, because norms sum in that order.
            parameter.grad = torch.empty_like(parameter).copy_(summed.view(parameter.shape))


class OrderedStatistics:
    """BatchNorm's running statistics, updated by the micro-batches of all ranks in order.

    Each micro-batch starts from zeros, so its part is the same wherever it runs: statistics r become
    (1 - momentum) ** batches * r + part, or, without a momentum, the average over all batches.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        norms: list[Any] = [module for module in model.modules() if isinstance(module, BatchNorm)]
        self._all, self._ranks = [norm for norm in norms if norm.running_mean is not None], ranks
        self._norms: list[Any] = []
        self._rows: list[Tensor] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run the micro-batches of a step inside this context; after an error, nothing has changed."""
        # Other layers normalize by their running statistics.
        self._choose([norm for norm in self._all if norm.training])
        if not self._norms:
            yield
            return
        self._rows.clear()
        self._before = self._take()
        try:
            yield
        except BaseException:
            self._put(self._before)
            raise
        self._merge()

    def _choose(self, norms: list[Any]) -> None:
        """Start tracking the statistics of these layers."""
        if norms == self._norms:
            return
        self._norms, self._widths = norms, [2 * norm.num_features for norm in norms]
        # NaN marks a layer without a momentum.
        momenta = [float("nan") if norm.momentum is None else norm.momentum for norm in norms]
        owner = torch.arange(len(norms)).repeat_interleave(torch.tensor(self._widths, dtype=torch.int64))
        kept = 1 - torch.tensor(momenta, dtype=torch.float64)[owner]
        device = self._all[0].running_mean.device
        self._owner, self._kept = owner.to(device), kept.to(device)

    def keep(self) -> None:
        if self._norms:
            self._rows.append(self._take())

    @torch.no_grad()
    def _take(self) -> Tensor:
        """Return all statistics, then each layer's batch count, and set them to zero."""
        counters = [norm.num_batches_tracked for norm in self._norms]
        statistics = [buffer for norm in self._norms for buffer in (norm.running_mean, norm.running_var)]
        taken = torch.cat([*(b.double() for b in statistics), torch.stack(counters).double()])
        torch._foreach_zero_(statistics)
        torch._foreach_zero_(counters)
        return taken

    @torch.no_grad()
    def _put(self, taken: Tensor) -> None:
        """Undo `_take`."""
        *parts, counts = taken.split([*self._widths, len(self._norms)])
        for norm, part, count in zip(self._norms, parts, counts, strict=True):
            norm.running_mean.copy_(part[: norm.num_features])
            norm.running_var.copy_(part[norm.num_features :])
            norm.num_batches_tracked.copy_(count)

    @torch.no_grad()
    def _merge(self) -> None:
        rows = torch.stack(self._rows)
        if self._ranks.world_size > 1:
            rows = gathered(rows.flatten(), self._ranks.world_size).view(-1, rows.size(1))
        sizes = [len(self._owner), len(self._norms)]
        merged, counts = self._before.split(sizes)
        for row in rows:
            moved, batches = row.split(sizes)
            share = (batches / (counts + batches).clamp(min=1))[self._owner]
            averaged = merged + share * (moved - merged)
            moving = self._kept ** batches[self._owner] * merged + moved
            merged = torch.where(self._kept.isnan(), averaged, moving)
            counts = counts + batches
        self._put(torch.cat([merged, counts]))
