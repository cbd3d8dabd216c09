"""Averages of a model's weights over a run, kept on the device and swapped in for evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ptfast.core.distributed import Ranks, sum_over_ranks
from ptfast.core.errors import SavedStateError
from ptfast.core.protocols import Watched
from ptfast.core.tensors.dtensors import local_part, shard_like
from ptfast.core.tensors.torch_internals import BatchNorm


class Average:
    """The base class of averages: how they track weights, are swapped in, and are saved.

    It averages a plain model's trainable parameters and its saved floating-point buffers if they are finite;
    half-precision ones in float32. The base class itself can load and swap in any kind of saved average.
    """

    extendable = True
    """Whether a longer run would start with the same averages."""
    note = ""
    """The kind of average, for the panel."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        saved = set(model.state_dict())
        followed: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        buffers = ((n, b) for n, b in model.named_buffers() if n in saved and b.is_floating_point())
        # The average of infinities, as in a mask, is NaN.
        followed |= {name: buffer for name, buffer in buffers if buffer.isfinite().all()}
        self._names = list(followed)
        weights = [weight.detach() for weight in followed.values()]
        types = [torch.float32 if weight.element_size() < 4 else weight.dtype for weight in weights]
        self._wholes = [weight.to(dtype, copy=True) for weight, dtype in zip(weights, types, strict=True)]
        # Each rank averages its shard of sharded weights.
        self._weights = [local_part(weight) for weight in weights]
        self._averages = [local_part(average) for average in self._wholes]
        halves = any(weight.element_size() < 4 for weight in weights)
        # Float32 copies for `lerp`, which needs one type; allocated once.
        self._widened = [torch.empty_like(average) for average in self._averages] if halves else None
        self._updates: int | Tensor = 0
        self._stale = False
        """Whether the averages have moved since `finalize`."""

    def update(self, step: int, skipped: Tensor | None = None) -> None:
        """Update the averages after `step`, counted from 1.

        `skipped` is 0-d, on the device: True if the step was skipped.
        """
        raise NotImplementedError

    def _follow(self, share: float | Tensor, skipped: Tensor | None) -> None:
        """Move the averages by the fraction `share` toward the weights, unless the step was `skipped`."""
        if skipped is None:
            torch._foreach_lerp_(self._averages, self._wide_weights(), float(share))
            self._updates += 1
            return
        # Only the device knows whether there was a step.
        shares = torch.where(skipped, 0.0, share).to(self._averages[0].dtype)
        changes = torch._foreach_sub(self._wide_weights(), self._averages)
        torch._foreach_mul_(changes, shares)
        torch._foreach_add_(self._averages, changes)
        self._updates = self._updates + ~skipped

    def finalize(self, watched: Watched = lambda batches: batches) -> None:
        """Prepare the averages for evaluation or saving; called on all ranks.

        `watched` wraps the batches this needs, and may stop early: then nothing changes.
        """

    @property
    def ready(self) -> bool:
        """Return True if there is an average yet. Waits for the device if steps may be skipped."""
        return bool(self._updates)

    def _wide_weights(self) -> list[Tensor]:
        if self._widened is None:
            return self._weights
        torch._foreach_copy_(self._widened, self._weights)
        return self._widened

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Swap averages, if there are any, into the model; restore its weights bit for bit at exit."""
        if not self.ready:
            yield
            return
        kept = [*self._weights, *(buffer.detach() for buffer in self._model.buffers())]
        with torch.no_grad():
            copies = [tensor.clone() for tensor in kept]
            torch._foreach_copy_(self._weights, self._averages)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(kept, copies)

    def copy_to_model(self) -> None:
        """Swap the averages in permanently."""
        if self.ready:
            with torch.no_grad():
                torch._foreach_copy_(self._weights, self._averages)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by the plain model's names, and the number of updates."""
        averages = dict(zip(self._names, self._wholes, strict=True))
        return {"averages": averages, "updates": int(self._updates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`; S002 for averages with other names or shapes."""
        averages = state["averages"]
        buffers = {name for name, _ in self._model.named_buffers()}
        expected = {name: average.shape for name, average in zip(self._names, self._wholes, strict=True)}
        given = {name: average.shape for name, average in averages.items()}
        # A buffer may have been finite when the run began but not now, or the other way round.
        alike = expected.keys() & given.keys() | ((expected.keys() | given.keys()) - buffers)
        odd = min((name for name in alike if given.get(name) != expected.get(name)), default=None)
        if odd is not None:
            what = f"the averaged weights belong to another model: {odd} differs"
            raise SavedStateError("S002", what, key="ema")
        for name, average in zip(self._names, self._wholes, strict=True):
            if name in averages:
                local_part(average).copy_(local_part(shard_like(average, averages[name])))
        self._updates = int(state["updates"])
        self._stale = self.ready


class MovingAverage(Average):
    """Running average `average <- decay * average + (1 - decay) * weight`, over about 1 / (1 - decay) steps.

    It includes BatchNorm's statistics. The first update copies the weights, so the random initial weights
    have no influence. Skipped steps do not count. With `warmup`, update k keeps at most `1 - k ** (-2/3)`,
    so that even in a short run the average covers only the latest part, as in timm's ModelEmaV3.

    Cost: one pass over the weights per step, in a few kernels; with fp16 gradient scaling two more passes,
    and memory for a temporary copy. Source: Polyak, Juditsky 1992; same values as
    torch.optim.swa_utils.AveragedModel.
    """

    def __init__(self, model: nn.Module, decay: float, *, warmup: bool = False) -> None:
        super().__init__(model)
        self._share, self._power = 1 - decay, -2 / 3 if warmup else -math.inf
        self.note = f"decay {decay:g}" + ", with a warm-up" * warmup

    def update(self, step: int, skipped: Tensor | None = None) -> None:
        if skipped is None:
            self._follow(max((self._updates + 1) ** self._power, self._share), None)
            return
        # Keep the count on the device even right after a resume, when the host knows it.
        number = self._updates + 1.0 + 0 * skipped
        self._follow(number.pow(self._power).clamp(min=self._share), skipped)


class Swa(Average):
    """Average, with equal weights, of the model at regular intervals near the end of a run.

    At a high learning rate, weights move around a wide minimum, whose middle generalizes better. BatchNorm's
    statistics are recomputed for the average before it is evaluated or saved.

    Args:
        steps: steps whose weights are averaged, all within the run.
        forward: passes the same number of training samples on each rank through the model, in batches
            wrapped by its argument; None for iterable data, where statistics are averaged like weights.
        extendable: whether a longer run would start at the same step.

    Cost: one pass over the weights at each of `steps`, and a forward pass over some thousand samples per
    evaluation. Source: Izmailov, Podoprikhin, Garipov, Vetrov, Wilson 2018, arXiv:1803.05407; same values as
    torch.optim.swa_utils. Some thousand samples suffice: Wu, Johnson 2021, arXiv:2105.07576.
    """

    def __init__(
        self,
        model: nn.Module,
        steps: Collection[int],
        forward: Callable[[Watched], None] | None = None,
        *,
        ranks: Ranks | None = None,
        extendable: bool = True,
    ) -> None:
        super().__init__(model)
        self.extendable, self._ranks = extendable, ranks or Ranks()
        self._steps, self._forward = frozenset(steps), forward
        norms = {name: module for name, module in model.named_modules() if isinstance(module, BatchNorm)}
        self._norms = {name: norm for name, norm in norms.items() if norm.track_running_stats}
        if steps:
            self.note = f"equal shares of {len(steps):,} steps from {min(steps):,} to {max(steps):,}"
            if self._norms:
                self.note += f", BatchNorm {'averaged' if forward is None else 'measured'}"

    def update(self, step: int, skipped: Tensor | None = None) -> None:
        if step not in self._steps:
            return
        updates = int(self._updates) if skipped is None else self._updates
        self._follow(1 / (updates + 1), skipped)
        self._stale = True

    def finalize(self, watched: Watched = lambda batches: batches) -> None:
        if not self._stale or not self.ready or self._forward is None or not self._norms:
            return
        norms: list[Any] = list(self._norms.values())
        with self.swapped(), torch.no_grad():
            training, momenta = self._model.training, [norm.momentum for norm in norms]
            self._model.eval()
            for norm in norms:
                norm.reset_running_stats()
                # Without a momentum, BatchNorm averages over all batches.
                norm.momentum, norm.training = None, True
            try:
                self._forward(watched)
            finally:
                self._model.train(training)
                for norm, momentum in zip(norms, momenta, strict=True):
                    norm.momentum = momentum
            for name, average in zip(self._names, self._averages, strict=True):
                module, _, buffer = name.rpartition(".")
                if module in self._norms and buffer.startswith("running_"):
                    measured = getattr(self._norms[module], buffer)
                    average.copy_(sum_over_ranks(measured.clone(), self._ranks) / self._ranks.world_size)
        self._stale = False


class ScheduleFree(Swa):
    """The average kept by a schedule-free optimizer, which trains at one point and returns another.

    Training weights are saved and restored here, because the optimizer's `eval` and `train` round them.

    Source: Defazio, Yang, Khaled, Mishchenko, Mehta, Cutkosky 2024, arXiv:2405.15682.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        forward: Callable[[Watched], None] | None = None,
        *,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(model, (), forward, ranks=ranks)
        self._optimizer = optimizer
        optimizer.train()
        measured = self._norms and forward is not None
        self.note = "schedule-free, by the optimizer" + ", BatchNorm measured" * bool(measured)

    def update(self, step: int, skipped: Tensor | None = None) -> None:
        self._updates += 1
        self._stale = True

    def finalize(self, watched: Watched = lambda batches: batches) -> None:
        if not self._stale:
            return
        with torch.no_grad():
            copies = [weight.clone() for weight in self._weights]
            self._optimizer.eval()
            torch._foreach_copy_(self._averages, self._weights)
            self._optimizer.train()
            torch._foreach_copy_(self._weights, copies)
        super().finalize(watched)
        self._stale = False
