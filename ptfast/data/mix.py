"""Mixup and CutMix: training on pairs of samples, made on the device out of one micro-batch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ptfast.data import draws
from ptfast.errors import ConfigError
from ptfast.run import DataInfo, Mixed


class Draw(NamedTuple):
    """How one micro-batch is mixed."""

    share: float
    """Part of each sample that stays its own, in [0, 1]."""
    shift: int
    """Sample i is mixed with sample i - shift of the micro-batch, counted around its end."""
    box: tuple[int, int, int, int] | None
    """Top, bottom, left and right of what CutMix pastes; None for mixup."""


@dataclass(frozen=True)
class Mix:
    """Mixes each sample of a micro-batch with another one of it.

    A network trained on straight lines between samples behaves more linearly there, remembers less by heart
    and generalises better (mixup); pasted patches make it look at whole objects (CutMix). Each micro-batch
    has one draw, a function of (seed, step, micro-batch); the sampler's order makes partners random. Where
    both are on, each mixes every second micro-batch on average.

    Args:
        mixup: parameter of the Beta distribution of mixup's share, > 0; 0 for no mixup. 0.2 is mild, 1 draws
            shares evenly.
        cutmix: the same for CutMix.
        seed: of the run.

    Cost: one or two passes over the inputs on the device, and about 10 us on the host.
    Source: Zhang, Cisse, Dauphin, Lopez-Paz 2018, arXiv:1710.09412; Yun et al. 2019, arXiv:1905.04899.
    """

    mixup: float
    cutmix: float
    seed: int

    def draw(self, step: int, micro_batch: int, shape: torch.Size) -> Draw:
        """How to mix inputs of `shape`: (batch, ...) for mixup, (..., height, width) for CutMix."""
        # Python's generator gives the same numbers everywhere; torch's and numpy's may change.
        generator = random.Random(draws.key(self.seed, step, micro_batch, draws.MIX))
        cuts = self.cutmix > 0 and (self.mixup <= 0 or generator.random() < 0.5)
        alpha = self.cutmix if cuts else self.mixup
        share = generator.betavariate(alpha, alpha)
        # A sample without others is mixed with itself.
        shift = generator.randrange(1, max(shape[0], 2))
        if not cuts:
            return Draw(share, shift, None)
        height, width = shape[-2:]
        side = (1 - share) ** 0.5 / 2
        y, x = generator.random() * height, generator.random() * width
        top, bottom = (min(max(round(y + sign * side * height), 0), height) for sign in (-1, 1))
        left, right = (min(max(round(x + sign * side * width), 0), width) for sign in (-1, 1))
        # What is left of a patch at the border counts, not what was drawn.
        share = 1 - (bottom - top) * (right - left) / (height * width)
        return Draw(share, shift, (top, bottom, left, right))

    def __call__(self, data: Any, step: int, micro_batch: int) -> tuple[Tensor, Mixed]:
        """Mixed `(inputs, targets)`; inputs keep shape, type and memory format.

        Raises:
            ConfigError: C011 for inputs that are no floating point numbers.
        """
        inputs, targets = data
        if not inputs.is_floating_point():
            what = f"inputs of type {inputs.dtype} cannot be mixed"
            raise ConfigError("C011", what, key="augment", suggestion="Use augment=none")
        share, shift, box = self.draw(step, micro_batch, inputs.shape)
        mixed = Mixed(targets, targets.roll(shift, 0), share)
        if box is None:
            return inputs.lerp(torch.cat([inputs[-shift:], inputs[:-shift]]), 1 - share), mixed
        top, bottom, left, right = box
        pasted = inputs.clone()
        pasted[shift:, ..., top:bottom, left:right] = inputs[:-shift, ..., top:bottom, left:right]
        pasted[:shift, ..., top:bottom, left:right] = inputs[-shift:, ..., top:bottom, left:right]
        return pasted, mixed


def build_mix(mixup: float, cutmix: float, seed: int, *, info: DataInfo, task: Any) -> Mix | None:
    """What mixes the training batches, or None where nothing does.

    Raises:
        ConfigError: C011 for data that cannot be mixed, or a task that does not take pairs of targets.
    """
    if not mixup and not cutmix:
        return None
    key, value = ("augment.mixup", mixup) if mixup else ("augment.cutmix", cutmix)
    if not getattr(task, "takes_mixed", False):
        what = f"{type(task).__name__} takes no pairs of targets"
        raise ConfigError("C011", what, key=key, value=value, suggestion="Set it to 0")
    if info.kind not in ("image", "features"):
        what = f"{info.kind} data cannot be mixed"
        raise ConfigError("C011", what, key=key, value=value, suggestion="Set it to 0")
    if cutmix and info.kind != "image":
        what, hint = "patches are cut out of images, and the data has none", "Use augment.mixup"
        raise ConfigError("C011", what, key="augment.cutmix", value=cutmix, suggestion=hint)
    return Mix(mixup, cutmix, seed)
