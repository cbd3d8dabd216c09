"""Changes to a model that keep what it computes: so far, the memory layout of images and convolutions."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn


def apply_channels_last(model: nn.Module) -> nn.Module:
    """Store the 4-d weights with channels innermost, in place; inputs must be laid out the same way.

    Convolution kernels read all channels of a pixel together, so the default layout is converted back and
    forth around each of them. Gains 1.1 to 1.5 times on most convolutional nets; those with many grouped
    convolutions can lose.

    Returns:
        The same module. Shapes, names and values do not change.
    """
    return model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def resolve_channels_last(
    setting: bool | Literal["auto"], model: nn.Module, kind: str, device: torch.device
) -> bool:
    """Whether to use channels-last: the setting, or for `auto` where it usually pays.

    That is on image inputs (`kind` of the data) on a CPU or CUDA device, for models whose 2-d convolutions
    are mostly ungrouped.
    """
    if setting != "auto":
        return setting
    ungrouped = [module.groups == 1 for module in model.modules() if isinstance(module, nn.Conv2d)]
    return kind == "image" and device.type in ("cpu", "cuda") and 2 * sum(ungrouped) > len(ungrouped)
