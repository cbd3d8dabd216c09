"""Mixup and CutMix: training on pairs of samples, mixed on the device within a micro-batch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ptfast.core.errors import ConfigError
from ptfast.core.protocols import DataInfo, Mixed
from ptfast.data.sampling import counter_draws
from ptfast.data.transforms.image_operations import inside, sent

BETA_POINTS = 4097
"""Points at which half a Beta distribution is tabulated; between them its error is below 1e-6."""


class Draw(NamedTuple):
    """The draws by which each sample of a micro-batch is mixed."""

    partners: NDArray[np.int64]
    """(batch,): the partner of each sample; every sample is the partner of exactly one."""
    shares: NDArray[np.float32]
    """(batch,): the weight of each sample itself, in [0, 1]."""
    cuts: NDArray[np.bool_]
    """(batch,): whether a patch of the partner is pasted; otherwise the two are blended."""
    boxes: NDArray[np.int64]
    """(4, batch): top, bottom, left and right of the changed box: the patch, or a whole blended image."""


@dataclass(frozen=True)
class Mix:
    """Mixes each sample of a micro-batch with another sample in it.

    A sample's partner, share and patch, and its method if both are on, are functions of (seed, step,
    micro-batch, place in it). All samples are mixed at once: pasting a patch is blending with weights of 0
    and 1.

    Args:
        mixup: parameter of the Beta distribution of mixup's shares, > 0; 0 for no mixup. 0.2 is mild, 1 draws
            shares uniformly.
        cutmix: the same for CutMix.
        masks: whether each pixel has a target: patches are then pasted into targets, too.

    Cost: two passes over the inputs on the device, and about 0.1 ms on the host, which never waits.
    Source: Zhang, Cisse, Dauphin, Lopez-Paz 2018, arXiv:1710.09412; Yun et al. 2019, arXiv:1905.04899.
    """

    mixup: float
    cutmix: float
    seed: int
    masks: bool = False

    def draw(self, step: int, micro_batch: int, shape: torch.Size) -> Draw:
        """Draw a mix for `shape`: (batch, ...) for mixup, (batch, ..., height, width) for CutMix."""
        size = shape[0]
        own_seed, numbers = counter_draws.key(self.seed, micro_batch), np.arange(5 * size).reshape(5, size)
        order, share, kind, y, x = counter_draws.uniform(own_seed, step, numbers, counter_draws.MIX)
        # A ring in random order gives each sample a partner; a single sample is its own partner.
        ring = order.argsort(kind="stable")
        partners = np.empty_like(ring)
        partners[ring] = np.roll(ring, 1)
        height, width = shape[-2:] if self.cutmix else (1, 1)
        if not self.cutmix:
            cuts, shares = np.zeros(size, bool), beta(self.mixup, share)
        elif not self.mixup:
            cuts, shares = np.ones(size, bool), beta(self.cutmix, share)
        else:
            cuts = kind < 0.5
            shares = np.where(cuts, beta(self.cutmix, share), beta(self.mixup, share))
        half = np.sqrt(1 - shares) / 2
        top, bottom = (np.rint((y + sign * half) * height).clip(0, height) for sign in (-1, 1))
        left, right = (np.rint((x + sign * half) * width).clip(0, width) for sign in (-1, 1))
        # Patches are clipped at the border, so the share follows from the clipped area.
        shares = np.where(cuts, 1 - (bottom - top) * (right - left) / (height * width), shares)
        whole = np.array([[0], [height], [0], [width]])
        boxes = np.where(cuts, np.stack([top, bottom, left, right]), whole).astype(np.int64)
        return Draw(partners, shares.astype(np.float32), cuts, boxes)

    def __call__(self, data: Any, step: int, micro_batch: int) -> tuple[Tensor, Mixed]:
        """Return mixed `(inputs, targets)`; inputs keep shape, type and memory format."""
        inputs, targets = data
        if not inputs.is_floating_point():
            what = f"inputs of type {inputs.dtype} cannot be mixed"
            raise ConfigError("C011", what, key="augment", suggestion="Use augment=none")
        draw = self.draw(step, micro_batch, inputs.shape)
        partners, shares = sent(draw.partners, inputs.device), sent(draw.shares, inputs.device)
        mixed = Mixed(targets, targets.index_select(0, partners), shares)
        if self.masks and self.cutmix:
            mixed = self._pasted(mixed, draw)
        # View pixels in memory order: torch is slow if a dimension of 3 comes last and the weights are
        # broadcast along it.
        is_channels_last = inputs.dim() == 4 and not inputs.is_contiguous()
        is_channels_last = is_channels_last and inputs.is_contiguous(memory_format=torch.channels_last)
        channels = inputs.shape[1] if is_channels_last else 0
        stored = inputs.permute(0, 2, 3, 1).flatten(2) if channels else inputs
        pairs = stored.index_select(0, partners)
        for weights in self._weights(draw, inputs.shape, channels):
            weight = sent(weights, inputs.device).to(inputs.dtype)
            torch.lerp(stored, pairs, weight, out=pairs)
        return (pairs.unflatten(2, (-1, channels)).permute(0, 3, 1, 2) if channels else pairs), mixed

    def _pasted(self, mixed: Mixed, draw: Draw) -> Mixed:
        """Paste the patches of partners into targets, for samples with a patch."""
        targets, partners, shares = mixed
        cuts = sent(draw.cuts, targets.device)
        patches = inside(sent(draw.boxes, targets.device), targets.shape[-2:]) & cuts[:, None, None]
        patches = patches.view(len(targets), *[1] * (targets.dim() - 3), *patches.shape[1:])
        return Mixed(torch.where(patches, partners, targets), partners, shares.where(~cuts, 1.0))

    def _weights(self, draw: Draw, shape: torch.Size, channels: int) -> Iterator[NDArray[np.float32]]:
        """Yield partner weights of columns, then of rows: their product would be as large as a channel."""
        least = np.where(draw.cuts, np.float32(1), 1 - draw.shares)
        if not self.cutmix:
            yield least.reshape(-1, *[1] * ((3 if channels else len(shape)) - 1))
            return
        top, bottom, left, right = draw.boxes[:, :, None]
        down, across = np.arange(shape[-2]), np.arange(shape[-1]).repeat(max(channels, 1))
        rows = np.where((top <= down) & (down < bottom), least[:, None], np.float32(0))
        columns = ((left <= across) & (across < right)).astype(np.float32)
        between = [1] * (0 if channels else len(shape) - 3)
        yield columns.reshape(len(columns), *between, 1, -1)
        yield rows.reshape(len(rows), *between, -1, 1)


def beta(alpha: float, chances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Map uniform `chances` in [0, 1) to Beta(alpha, alpha), by the inverse of its CDF.

    Unlike numpy's generator, this gives the same numbers in every version.
    """
    points, masses = _lower_half(alpha)
    value = np.interp(np.minimum(chances, 1 - chances), masses, points) ** (1 / min(alpha, 1))
    return np.where(chances < 0.5, value, 1 - value)


@functools.cache
def _lower_half(alpha: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return points x**p from 0 to x = 1/2, p = min(alpha, 1), and Beta(alpha, alpha)'s CDF at each."""
    # The density over x**p is finite; over x, it has a pole at 0 for alpha < 1.
    power = min(alpha, 1)
    points = np.linspace(0, 0.5**power, BETA_POINTS)
    x = points ** (1 / power)
    density = (1 - x if alpha <= 1 else 4 * x * (1 - x)) ** (alpha - 1)
    masses = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    return points, masses / (2 * masses[-1])


def build_mix(mixup: float, cutmix: float, seed: int, *, info: DataInfo, task: Any) -> Mix | None:
    """Build the transform that mixes training batches; return None if both are off.

    Raises:
        ConfigError: C011 for data that cannot be mixed, and tasks that do not take pairs of targets.
    """
    if not mixup and not cutmix:
        return None
    key, value = ("augment.mixup", mixup) if mixup else ("augment.cutmix", cutmix)
    takes_mixed = getattr(task, "takes_mixed", False)
    if not takes_mixed or info.kind not in ("image", "features"):
        what = f"{info.kind} data cannot be mixed"
        if not takes_mixed:
            what = f"{type(task).__name__} cannot train on pairs of targets"
        raise ConfigError("C011", what, key=key, value=value, suggestion="Set it to 0")
    if cutmix and info.kind != "image":
        what, hint = "patches need images, and the data has none", "Use augment.mixup"
        raise ConfigError("C011", what, key="augment.cutmix", value=cutmix, suggestion=hint)
    if cutmix and info.target_kind == "unknown":
        what = "targets that may be coordinates, such as boxes or points, cannot be pasted with a patch"
        raise ConfigError("C011", what, key="augment.cutmix", value=cutmix, suggestion="Set it to 0")
    return Mix(mixup, cutmix, seed, info.target_kind in ("mask", "map"))
