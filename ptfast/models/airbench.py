"""The convolutional network of the CIFAR-10 speed-runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptfast.core.errors import ConfigError
from ptfast.core.sections.section import Count, OpenFraction


class Airbench(nn.Module):
    """A whitening layer and three groups of 3x3 convolutions, made to reach 94 % on CIFAR-10 in 8 epochs.

    The first filters of each convolution start as the identity, one for each input channel, and the scales of
    the norms stay at 1. It has 2.0 M parameters; the network for 96 %, with widths of [128, 384, 512] and
    three convolutions in a group, has 9.9 M. Images need 9x9 pixels, or 8x8 with patches of 3.

    Args:
        num_classes: outputs, filled from the data.
        in_channels: channels of an image, filled from the data.
        widths: channels of each group; its first convolution is followed by a pooling of 2x2.
        convolutions: convolutions per group, 2 or 3; a third is added to the output of the first.
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
        norm_momentum: OpenFraction = 0.4,
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


_AT_ONCE = 256
"""Images whose patches are in memory together."""


class Whitening(nn.Conv2d):
    """A convolution whose outputs are uncorrelated and of one size on the data, each with its negative.

    Neighboring pixels are nearly alike, and a first layer spends its first epochs on learning to tell them
    apart. Here it begins with the answer: filters are the eigenvectors of the covariance of patches, over the
    root of their eigenvalues. They are never trained, which saves their gradients; a bias is. They are random
    until `init_from_data` has seen inputs.

    A patch has `side` pixels. Outputs are as large as the images for 3, a row and a column smaller for 2.

    Source: Page 2018, "How to Train Your ResNet 8: Bag of Tricks"; Jordan 2024, arXiv:2404.00498.
    """

    def __init__(self, in_channels: int, side: int) -> None:
        super().__init__(in_channels, 2 * in_channels * side**2, side, padding=(side - 1) // 2)
        self.weight.requires_grad_(False)
        assert self.bias is not None
        nn.init.zeros_(self.bias)

    @torch.no_grad()
    def init_from_data(self, images: Tensor) -> None:
        """Take the filters from the patches of `images`, (batch, channels, height, width), as trained on."""
        self.weight.copy_(whitening_filters(images, self.kernel_size[0]))


def whitening_filters(images: Tensor, side: int, eps: float = 5e-4) -> Tensor:
    """Filters that whiten the patches of `images`, and their negatives, the most varied direction first.

    They are (2 * channels * side**2, channels, side, side), on the CPU, in float64, for patches of `side`
    pixels. The mean of a patch counts as variation, as in the sources. `eps` is added to every eigenvalue,
    for directions in which the data hardly varies.

    Cost: about a second for 5,000 images of 32 x 32, and 130 MB for patches of 3 x 3.
    """
    size = images.shape[1] * side**2
    products, num_patches = torch.zeros(size, size, dtype=torch.float64), 0
    for part in images.split(_AT_ONCE):
        patches = part.cpu().double().unfold(2, side, 1).unfold(3, side, 1)
        patches = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, size)
        products += patches.T @ patches
        num_patches += len(patches)
    eigenvalues, eigenvectors = torch.linalg.eigh(products / num_patches)
    filters = (eigenvectors / (eigenvalues.clamp(min=0) + eps).sqrt()).T.flip(0)
    return torch.cat([filters, -filters]).reshape(-1, images.shape[1], side, side)
