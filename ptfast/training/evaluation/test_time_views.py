"""Test-time augmentation: a model's outputs averaged over several views of each image."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptfast.core.errors import ConfigError
from ptfast.core.protocols import DataInfo
from ptfast.core.tensors.trees import tree_map


class ViewAveraged(nn.Module):
    """The mean of a model's outputs over images, their mirror images, and both moved by some pixels.

    Where such changes mean nothing, several looks at an image err less than one: some tenths of a point of
    accuracy that need no training, and so a run that is shorter for the same accuracy.

    Args:
        model: takes images (batch, channels, height, width), returns outputs (batch, ...), such as logits;
            those that are as high and wide as the images are mirrored back, pixel by pixel.
        flip: look at mirror images too.
        shift: pixels, fewer than an image has on a side. Images moved up and left by so many, and down and
            right, weigh half of the mean, the images where they are the other half; what comes into view is
            reflected from inside. 0 for none.

    Cost: twice the forward passes of an evaluation for `flip`, times three for `shift`. Source: Krizhevsky,
    Sutskever, Hinton 2012; the weights of Jordan 2024, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU",
    arXiv:2404.00498.
    """

    def __init__(self, model: nn.Module, *, flip: bool, shift: int = 0) -> None:
        super().__init__()
        self.model, self.training, self._flip, self._shift = model, model.training, flip, shift

    def forward(self, images: Tensor) -> Any:
        in_place = self._over_mirrors(images)
        if not self._shift:
            return in_place
        height, width = images.shape[-2:]
        padded = F.pad(images, (self._shift,) * 4, mode="reflect")
        up, down = (
            self._over_mirrors(padded[..., start : start + height, start : start + width])
            for start in (2 * self._shift, 0)
        )
        return tree_map(_mean, in_place, tree_map(_mean, up, down))

    def _over_mirrors(self, images: Tensor) -> Any:
        outputs = self.model(images)
        if not self._flip:
            return outputs
        mirrored = tree_map(partial(_mirror_back, shape=images.shape[-2:]), self.model(images.flip(-1)))
        return tree_map(_mean, outputs, mirrored)


def _mirror_back(outputs: Tensor, shape: torch.Size) -> Tensor:
    return outputs.flip(-1) if outputs.dim() > 2 and outputs.shape[-2:] == shape else outputs


def _mean(one: Tensor, other: Tensor) -> Tensor:
    return (one + other) / 2


def averaged_over_views(model: nn.Module, *, flip: bool, shift: int) -> nn.Module:
    """`model` as evaluations look at it: over several views, or as it is where there is one."""
    return ViewAveraged(model, flip=flip, shift=shift) if flip or shift else model


def check_views(flip: bool, shift: int, info: DataInfo, task: Any, *, targets: str = "auto") -> None:
    """Refuse to average over views where there are no images, or no outputs to average.

    Args:
        targets: `keep` says that those which may be places in an image are none.

    Raises:
        ConfigError: C011.
    """
    what = None
    if not (flip or shift):
        return
    if info.kind != "image":
        what = f"only images can be flipped or shifted, and this is {info.kind} data"
    elif info.target_kind == "unknown" and targets == "auto":
        what = "what may be places in an image, such as boxes or points, lies elsewhere in its other views"
    elif type(task).__name__ == "OwnLoss":
        what = "a model that returns its own loss has no outputs that can be averaged before it"
    if what is not None:
        key, value, off = ("eval.flip", "true", "false") if flip else ("eval.shift", shift, 0)
        raise ConfigError("C011", what, key=key, value=value, suggestion=f"Set {key}={off}")
    if shift and info.target_kind in ("mask", "map"):
        what = "pixels that a shift moves out of the image have no outputs"
    elif shift and info.input_shape is not None and shift >= min(info.input_shape[-2:]):
        what = f"the images have {info.input_shape[-2]} x {info.input_shape[-1]} pixels"
    if what is not None:
        raise ConfigError("C011", what, key="eval.shift", value=shift, suggestion="Set eval.shift=0")
