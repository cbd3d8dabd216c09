"""Test-time flip: a model's outputs averaged over each image and its mirror image."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ptfast.core.errors import ConfigError
from ptfast.core.protocols import DataInfo
from ptfast.core.tensors.trees import tree_map


class FlipAveraged(nn.Module):
    """The mean of a model's outputs for images and for their mirror images.

    Where left and right mean nothing, two looks at an image err less than one: some tenths of a point of
    accuracy that need no training, and so a run that is shorter for the same accuracy.

    Args:
        model: takes images (batch, channels, height, width), returns outputs (batch, ...), such as logits;
            those that are as high and wide as the images are mirrored back, pixel by pixel.

    Cost: twice the forward passes of an evaluation. Source: Krizhevsky, Sutskever, Hinton 2012; as used by
    Jordan 2024, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv:2404.00498.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.training = model, model.training

    def forward(self, images: Tensor) -> Any:
        outputs, mirrored = self.model(images), self.model(images.flip(-1))
        return tree_map(partial(_mean, shape=images.shape[-2:]), outputs, mirrored)


def _mean(outputs: Tensor, mirrored: Tensor, shape: torch.Size) -> Tensor:
    if outputs.dim() > 2 and outputs.shape[-2:] == shape:
        mirrored = mirrored.flip(-1)
    return (outputs + mirrored) / 2


def check_flip(flip: bool, info: DataInfo, task: Any, *, targets: str = "auto") -> None:
    """Refuse to average over mirror images where there are no images, or no outputs to average.

    Args:
        targets: `keep` says that those which may be places in an image are none.

    Raises:
        ConfigError: C011.
    """
    if not flip:
        return
    what = None
    if info.kind != "image":
        what = f"only images can be flipped, and this is {info.kind} data"
    elif info.target_kind == "unknown" and targets == "auto":
        what = "what may be places in an image, such as boxes or points, lies elsewhere in its mirror image"
    elif type(task).__name__ == "OwnLoss":
        what = "a model that returns its own loss has no outputs that can be averaged before it"
    if what is not None:
        raise ConfigError("C011", what, key="eval.flip", value="true", suggestion="Set eval.flip=false")
