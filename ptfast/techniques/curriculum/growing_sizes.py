"""Images and sequences that start small and grow in training."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ptfast.core.errors import ConfigError
from ptfast.core.protocols import DataInfo, PackedTokens


class Stages(NamedTuple):
    """A size that grows in stages."""

    values: tuple[int, ...]
    """Sizes in increasing order."""
    starts: tuple[int, ...]
    """The first step, from 0, of each value."""

    def at(self, step: int) -> int:
        return self.values[bisect_right(self.starts, step) - 1]


def grow(first: int, last: int, multiple: int, over_steps: int) -> Stages:
    """Return equal stages from `first` by multiples of `multiple` to `last`, which starts at `over_steps`."""
    values = (first, *range((first // multiple + 1) * multiple, last, multiple), last)
    return Stages(values, tuple(index * over_steps // (len(values) - 1) for index in range(len(values))))


@dataclass
class Resize:
    """Images that start small and grow, by antialiased bilinear interpolation on the device.

    A convolution's work falls with the square of the side. Evaluation is always at full size.

    Args:
        stages: pixels of the shorter side, by step.
        shape: (height, width) at full size.
        masks: whether targets have a value for each pixel, and are resized with their images.

    Source: Howard et al. 2018, fast.ai's entry to DAWNBench; Tan, Le 2021, arXiv:2104.00298, section 4.
    """

    stages: Stages
    shape: tuple[int, int]
    masks: bool = False

    def size(self, shorter: int) -> tuple[int, int]:
        """Return (height, width) for a shorter side, in the proportions of the full size."""
        height, width = (round(side * shorter / min(self.shape)) for side in self.shape)
        return height, width

    def __call__(self, data: Any, step: int, micro_batch: int) -> Any:
        """Resize the images of a step's `(images, targets)`, keeping their type and memory format."""
        shorter = self.stages.at(step)
        if shorter == self.stages.values[-1]:
            return data
        images, targets = data
        layout = torch.channels_last
        is_last = images.is_contiguous(memory_format=layout) and not images.is_contiguous()
        size = self.size(shorter)
        images = F.interpolate(images, size=size, mode="bilinear", antialias=True)
        if self.masks:
            for side, length in ((-2, size[0]), (-1, size[1])):
                # Take the pixels under the centers of the fewer new ones.
                centers = 2 * torch.arange(length, device=targets.device) + 1
                targets = targets.index_select(side, centers * targets.shape[side] // (2 * length))
        return images.contiguous(memory_format=layout if is_last else torch.contiguous_format), targets


@dataclass
class Truncation:
    """Sequences that start short and grow, cut on the device.

    Attention's work grows with the square of the length, and short sequences keep early steps stable at large
    batches and learning rates. Tokens that are cut off do not count in the loss.

    Source: Li, Zhang, He 2022, arXiv:2108.06084.
    """

    stages: Stages
    """Tokens per sequence, by step."""

    def __call__(self, data: Any, step: int, micro_batch: int) -> Any:
        """Cut a step's `(tokens, targets)`, or a mapping of such tensors (batch, length, ...), to length."""
        length = self.stages.at(step)
        if length == self.stages.values[-1]:
            return data
        if isinstance(data, Mapping):
            return {name: _truncated(value, length) for name, value in data.items()}
        return tuple(_truncated(value, length) for value in data)


def build_resize(first: int | Literal["auto"], multiple: int, over_steps: int, info: DataInfo) -> Resize:
    """Return a `Resize` from `first` pixels of the shorter side (`auto`: half) to the data's own size.

    C011 if the data has no images, or no larger ones.
    """
    key = "curriculum.image_size_from"
    if info.kind != "image" or info.input_shape is None:
        raise _rejected(f"{info.kind} data has no images", key, first)
    _, *shape = info.input_shape
    full = min(shape)
    first = full // 2 if first == "auto" else first
    if not 0 < first < full:
        raise _rejected(f"not smaller than the images, which have {full} pixels", key, first)
    stages, masks = grow(first, full, multiple, over_steps), info.target_kind in ("mask", "map")
    if info.target_kind == "unknown":
        what = "targets that may be coordinates, such as boxes or points, are not resized with the image"
        raise _rejected(what, key, first)
    return Resize(stages, (shape[0], shape[1]), masks=masks)


def build_truncation(
    first: int | Literal["auto"], multiple: int, over_steps: int, info: DataInfo
) -> Truncation:
    """Return a `Truncation` from `first` tokens (`auto`: a quarter) to the data's own length.

    C011 if the data is not text for language modeling, or its sequences are not longer.
    """
    key, full = "curriculum.length_from", info.context_length
    if info.kind != "tokens" or full is None:
        raise _rejected(f"{info.kind} data has no sequences to cut", key, first)
    first = full // 4 if first == "auto" else first
    if not 0 < first < full:
        raise _rejected(f"not shorter than the sequences, which have {full} tokens", key, first)
    return Truncation(grow(first, full, multiple, over_steps))


def _rejected(what: str, key: str, first: int | str) -> ConfigError:
    return ConfigError("C011", what, key=key, value=first, suggestion="Use curriculum=none")


def describe_growth(what: str, stages: Stages) -> str:
    """Format one line for the panel; `what` has placeholders for the first and the last size."""
    values, starts = stages
    return f"{what.format(values[0], values[-1])} in {len(values)} stages over {starts[-1]:,} steps"


def _truncated(value: Any, length: int) -> Any:
    if isinstance(value, PackedTokens):
        return PackedTokens(*(_truncated(item, length) for item in value))
    return value[:, :length] if isinstance(value, Tensor) and value.dim() > 1 else value
