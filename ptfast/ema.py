"""Exponential moving average of a model's weights, kept on the device and put in for evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ptfast.errors import SavedStateError
from ptfast.shards import local_part, shard_like


class Ema:
    """Running average `average <- decay * average + (1 - decay) * weight` of what training changes.

    The average of the last steps often generalises better than the last weights, for the price of one more
    copy. Averaged are the parameters that train and the saved floating-point buffers (BatchNorm's statistics
    belong to the weights they were measured with). The first update copies, so the random initial weights do
    not linger. Averages of half-width weights are kept in float32: what a step adds would be lost in bf16.

    Args:
        model: the plain model, before it is wrapped for several ranks.
        decay: in (0, 1); about the last 1 / (1 - decay) steps count.

    Cost: one pass over the weights per step, a few kernels in all; an eighth of what AveragedModel takes on
    the CPU. Source: Polyak, Juditsky 1992; the same figures as torch.optim.swa_utils.AveragedModel.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        saved = set(model.state_dict())
        followed: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        followed |= {n: b for n, b in model.named_buffers() if n in saved and b.is_floating_point()}
        self._names = list(followed)
        weights = [weight.detach() for weight in followed.values()]
        self._wholes = [_wide(weight) for weight in weights]
        # Where weights are shared out, each rank averages its part.
        self._weights = [local_part(weight) for weight in weights]
        self._averages = [local_part(average) for average in self._wholes]
        halves = any(
            weight.dtype != average.dtype
            for weight, average in zip(self._weights, self._averages, strict=True)
        )
        self._widened = [torch.empty_like(average) for average in self._averages] if halves else None
        self._average = get_ema_multi_avg_fn(decay)
        self._updates = 0

    def update(self) -> None:
        """Follow the weights; call once after every optimizer step."""
        weights = self._weights
        if self._widened is not None:
            torch._foreach_copy_(weights := self._widened, self._weights)
        if self._updates:
            self._average(self._averages, weights, self._updates)
        else:
            torch._foreach_copy_(self._averages, weights)
        self._updates += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Have the averages in the model, and afterwards its own weights and buffers back, bit for bit."""
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
        """Replace the model's weights by their averages, for good."""
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._averages)

    def state_dict(self) -> dict[str, Any]:
        """Averages by the plain model's names, and the number of updates."""
        return {"averages": dict(zip(self._names, self._wholes, strict=True)), "updates": self._updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            SavedStateError: S002 for averages of other names or shapes.
        """
        averages = state["averages"]
        expected = {name: average.shape for name, average in zip(self._names, self._wholes, strict=True)}
        given = {name: average.shape for name, average in averages.items()}
        if given != expected:
            odd = min(name for name in expected | given if given.get(name) != expected.get(name))
            raise SavedStateError(
                "S002", f"the averaged weights are of another model: {odd} differs", key="ema"
            )
        for name, average in zip(self._names, self._wholes, strict=True):
            local_part(average).copy_(local_part(shard_like(average, averages[name])))
        self._updates = int(state["updates"])


def _wide(weight: Tensor) -> Tensor:
    """A copy of `weight`, in float32 where it is narrower."""
    return weight.to(torch.float32 if weight.element_size() < 4 else weight.dtype, copy=True)
