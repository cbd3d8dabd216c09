"""BatchNorm over several ranks: statistics of one large batch, or the running statistics of one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ptfast.core.distributed import Ranks, broadcast_buffers, gathered
from ptfast.core.errors import ConfigError
from ptfast.core.tensors.torch_internals import BatchNorm


def apply_sync_batchnorm(model: nn.Module) -> int:
    """Let every BatchNorm of `model` compute its statistics over the micro-batches of all ranks.

    Statistics over one rank's few samples are noisy. Layers are replaced, and keep their parameters, buffers
    and names. Returns the number of layers; C011 if there are none.

    Cost: one gather in forward and one sum in backward per layer, for which all ranks wait.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, BatchNorm) and not isinstance(child, nn.SyncBatchNorm)
    ]
    if not found:
        what, hint = f"{type(model).__name__} has no BatchNorm", "Set it to false"
        raise ConfigError("C011", what, key="parallel.sync_batchnorm", value="true", suggestion=hint)
    replaced: dict[int, SyncedBatchNorm] = {}
    for parent, name, norm in found:
        setattr(parent, name, replaced.setdefault(id(norm), SyncedBatchNorm(norm)))
    return len(replaced)


class SyncedBatchNorm(BatchNorm):
    """A BatchNorm over all ranks: same values as one process with all their samples.

    Torch's own version runs only on GPUs, and makes the host wait for the device in every layer.

    Source: Ioffe, Szegedy 2015, arXiv:1502.03167, with the gradient through the statistics of all ranks.
    """

    counts: bool
    """Whether the next input counts; the dummy batch of a rank without samples does not."""

    def __init__(self, norm: BatchNorm) -> None:
        nn.Module.__init__(self)
        self.num_features, self.eps, self.momentum = norm.num_features, norm.eps, norm.momentum
        self.affine, self.track_running_stats = norm.affine, norm.track_running_stats
        self.counts = True
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(norm, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))
        self.train(norm.training)

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any input with channels."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input`, of shape (samples, channels, ...), by the statistics of all ranks."""
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        output, mean, variance, count = _Normalized.apply(
            input, self.weight, self.bias, self.eps, self.counts
        )
        if self.training and self.running_mean is not None:
            self._follow(mean, variance, count)
        return output

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        running_mean, running_var, batches = self.running_mean, self.running_var, self.num_batches_tracked
        assert running_mean is not None
        assert running_var is not None
        assert batches is not None
        batches.add_(1)
        momentum: Any = self.momentum if self.momentum is not None else 1 / batches.to(mean.dtype)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)


class _Normalized(torch.autograd.Function):
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the samples and positions of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, counts: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the output in the type of `x`; mean, biased variance and count in float32 or wider."""
        dims = [0, *range(2, x.dim())]
        wide = x if x.dtype == torch.float64 else x.float()
        variance, mean = torch.var_mean(wide, dims, correction=0)
        number = torch.full((1,), x.numel() / x.size(1) if counts else 0.0, device=x.device, dtype=mean.dtype)
        own = torch.cat([mean, variance, number])
        # Merge means and variances: sums of squares would lose precision by cancellation.
        by_rank = gathered(own, torch.distributed.get_world_size())
        means, variances, numbers = by_rank.split([len(mean), len(mean), 1], dim=1)
        count = numbers.sum().clamp(min=1)
        shares = numbers / count
        mean = (shares * means).sum(0)
        variance = (shares * (variances + (means - mean).square())).sum(0)
        scale = (variance + eps).rsqrt()
        shape = [1, -1] + [1] * (x.dim() - 2)
        factor = scale if weight is None else scale * weight
        shift = -mean * factor if bias is None else bias - mean * factor
        output = torch.addcmul(shift.view(shape), wide, factor.view(shape)).to(x.dtype)
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.mark_non_differentiable(mean, variance, count)
        ctx.has_bias = bias is not None
        return output, mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of the input, through all ranks' statistics, and of the local weight and bias."""
        x, weight, mean, scale, count = ctx.saved_tensors
        shape, dims = [1, -1] + [1] * (x.dim() - 2), [0, *range(2, x.dim())]
        wide = x if x.dtype == torch.float64 else x.float()
        grad = grads[0].to(wide.dtype)
        normal = (wide - mean.view(shape)) * scale.view(shape)
        sums = torch.stack([grad.sum(dims), (grad * normal).sum(dims)])
        grad_bias, grad_weight = sums.clone() if ctx.needs_input_grad[0] else sums
        grad_input = None
        if ctx.needs_input_grad[0]:
            torch.distributed.all_reduce(sums)
            of_mean, of_normal = (part.view(shape) for part in sums / count)
            factor = scale if weight is None else scale * weight
            grad_input = ((grad - of_mean - normal * of_normal) * factor.view(shape)).to(x.dtype)
        of_weight = None if weight is None else grad_weight
        return grad_input, of_weight, grad_bias if ctx.has_bias else None, None, None


class RunningStatistics:
    """BatchNorm's running statistics over several ranks, equal to one process with all the micro-batches.

    A rank's own micro-batches move the statistics from r to r_k = keep_k r + part_k, where keep_k is
    (1 - momentum) ** batches. As in one process, merged <- keep_k merged + part_k, rank by rank.

    Layers without a momentum take the first rank's statistics. `model` is the plain model, on its device and
    with its checkpoint loaded.

    Cost: one gather of all statistics and a few kernels per step; nothing for a model without BatchNorm.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
        self._synced = [norm for norm in norms if isinstance(norm, SyncedBatchNorm)]
        own = [norm for norm in norms if not isinstance(norm, (SyncedBatchNorm, nn.SyncBatchNorm))]
        self._norms = [norm for norm in own if norm.running_mean is not None]
        moving = [norm for norm in self._norms if norm.momentum is not None]
        averaging = [norm for norm in self._norms if norm.momentum is None]
        self._averaging: list[Tensor] = [b for norm in averaging for b in norm.buffers(recurse=False)]
        self._buffers: list[Any] = [b for norm in moving for b in (norm.running_mean, norm.running_var)]
        self._counters: list[Any] = [norm.num_batches_tracked for norm in moving]
        if moving:
            self._sizes = [buffer.numel() for buffer in self._buffers]
            self.reread()
            device, repeats = self._counts.device, [2 * norm.num_features for norm in moving]
            self._owner = torch.arange(len(moving)).repeat_interleave(torch.tensor(repeats)).to(device)
            kept = [1 - float(norm.momentum or 0) for norm in moving]
            self._kept = torch.tensor(kept, dtype=self._statistics.dtype).to(device)[self._owner]

    def reread(self) -> None:
        """Read the model's statistics again as those after the last step, for example if it was skipped."""
        if self._buffers:
            self._statistics = torch.cat(self._buffers)
            self._counts = torch.stack(self._counters)

    @torch.no_grad()
    def merge(self) -> None:
        """Merge the statistics of all ranks; each rank calls it once after every step."""
        broadcast_buffers(self._averaging, self._ranks)
        if not self._buffers:
            return
        own = torch.cat([*self._buffers, torch.stack(self._counters) - self._counts])
        by_rank = gathered(own, self._ranks.world_size)
        statistics, batches = by_rank.split([len(self._owner), len(self._counters)], dim=1)
        before = merged = self._statistics
        for moved, keep in zip(statistics, self._kept ** batches[:, self._owner], strict=True):
            merged = torch.addcmul(moved, keep, merged - before)
        self._statistics, self._counts = merged, self._counts + batches.sum(0).long()
        torch._foreach_copy_(self._buffers, list(merged.split(self._sizes)))
        torch._foreach_copy_(self._counters, list(self._counts.unbind()))

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Keep a forward pass out of the statistics, for the dummy batch of a rank without samples."""
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
