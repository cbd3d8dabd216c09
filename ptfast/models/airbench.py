"""The convolutional network of the CIFAR-10 speed-runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from ptfast.core.errors import ConfigError
from ptfast.core.sections.section import Count, Share
from ptfast.models.resnet9 import Whitening


class Airbench(nn.Module):
    """A whitening layer and three groups of 3x3 convolutions, made to reach 94 % on CIFAR-10 in 8 epochs.

    The first filters of each convolution start as the identity, one for each input channel, and the scales of
    the norms stay at 1. It has 2.0 M parameters; the network for 96 %, with widths of [128, 384, 512] and
    three convolutions in a group, has 9.9 M. Images need 9x9 pixels, or 8x8 with patches of 3.

    Args:
        num_classes: outputs, filled from the data.
        in_channels: channels of an image, filled from the data.
        widths: channels of each group; its first convolution is followed by a pooling of 2x2.
        convolutions: of a group, 2 or 3; of three, the last is added to the output of the first.
        whitening: side in pixels of the patches by which the fixed first layer is computed from the data.
        norm_momentum: share of a batch in the running statistics of the norms.
        logit_scale: factor of the logits.

    Source: Jordan 2024, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv:2404.00498.
    """

    def __init__(
        self,
        num_classes: Count,
        in_channels: Count = 3,
        widths: Sequence[int] = (64, 256, 256),
        convolutions: Literal[2, 3] = 2,
        whitening: Literal[2, 3] = 2,
        norm_momentum: Share = 0.4,
        logit_scale: float = 1 / 9,
    ) -> None:
        super().__init__()
        if not widths or min(widths) < 1:
            raise ConfigError("C005", "must be positive numbers", key="model.widths", value=[*widths])
        self.whiten = Whitening(in_channels, whitening)
        ends = [self.whiten.out_channels, *widths]
        self.groups = nn.Sequential(*(Group(*pair, convolutions, norm_momentum) for pair in pairwise(ends)))
        self.head = nn.Linear(ends[-1], num_classes, bias=False)
        self.logit_scale = logit_scale

    def init_from_data(self, images: Tensor) -> None:
        """Compute the whitening layer from `images` as they are trained on."""
        self.whiten.init_from_data(images)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, in_channels, height, width) to logits (batch, num_classes)."""
        x = self.groups(F.gelu(self.whiten(images)))
        return self.head(F.max_pool2d(x, x.shape[2:]).flatten(1)) * self.logit_scale


class Group(nn.Module):
    """Convolutions, each with a norm and GELU, at half the height and width from the first one on."""

    def __init__(self, in_channels: int, channels: int, convolutions: int, norm_momentum: float) -> None:
        super().__init__()
        ends = [in_channels, *[channels] * convolutions]
        convs = [nn.Conv2d(*pair, 3, padding=1, bias=False) for pair in pairwise(ends)]
        norms = [nn.BatchNorm2d(channels, eps=1e-12, momentum=norm_momentum) for _ in convs]
        for conv, norm in zip(convs, norms, strict=True):
            nn.init.dirac_(conv.weight.data[: conv.in_channels])
            norm.weight.requires_grad_(False)
        self.convs, self.norms = nn.ModuleList(convs), nn.ModuleList(norms)

    def forward(self, x: Tensor) -> Tensor:
        x = first = F.gelu(self.norms[0](F.max_pool2d(self.convs[0](x), 2)))
        x = self.norms[1](self.convs[1](x))
        if len(self.convs) > 2:
            x = self.norms[2](self.convs[2](F.gelu(x))) + first
        return F.gelu(x)
