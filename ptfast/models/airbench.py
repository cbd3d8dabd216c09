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
    """A whitening layer and three groups of 3x3 convolutions, for 94 % on CIFAR-10 in 8 epochs.

    The first filters of each convolution start as the identity, one per input channel, and the norms' scales
    stay at 1. It has 2.0 M parameters; the network for 96 %, with widths of [128, 384, 512] and three
    convolutions per group, has 9.9 M. Images must have at least 9x9 pixels, or 8x8 with patches of 3.

    Args:
        num_classes: outputs, filled from the data.
        in_channels: channels of an image, filled from the data.
        widths: channels of each group; 2x2 pooling follows its first convolution.
        convolutions: convolutions per group, 2 or 3; a third is added to the output of the first.
        whitening: side in pixels of the data's patches, from which the fixed first layer is computed.
        norm_momentum: weight of each batch in the running statistics of the norms.
        logit_scale: factor on the logits.

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
        """Compute the whitening layer from `images`, preprocessed as in training."""
        self.whiten.init_from_data(images)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, in_channels, height, width) to logits (batch, num_classes)."""
        x = self.groups(F.gelu(self.whiten(images)))
        return self.head(F.max_pool2d(x, x.shape[2:]).flatten(1)) * self.logit_scale


class Group(nn.Module):
    """Convolutions, each with a norm and GELU; pooling after the first halves height and width."""

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
"""Number of images whose patches are in memory at once."""


class Whitening(nn.Conv2d):
    """A convolution whose outputs on the data are uncorrelated and equally large, each with its negative.

    Neighboring pixels are nearly alike, and an ordinary first layer spends its first epochs learning to tell
    them apart. Here, the filters are computed: the eigenvectors of the patches' covariance, divided by the
    square roots of their eigenvalues. Filters are frozen, which saves their gradients; the bias trains. They
    are random until `init_from_data` is called.

    Patches have `side` x `side` pixels. Outputs have the images' size for 3, one row and column less for 2.

    Source: Page 2018, "How to Train Your ResNet 8: Bag of Tricks"; Jordan 2024, arXiv:2404.00498.
    """

    def __init__(self, in_channels: int, side: int) -> None:
        super().__init__(in_channels, 2 * in_channels * side**2, side, padding=(side - 1) // 2)
        self.weight.requires_grad_(False)
        assert self.bias is not None
        nn.init.zeros_(self.bias)

    @torch.no_grad()
    def init_from_data(self, images: Tensor) -> None:
        """Compute the filters from `images` (batch, channels, height, width), preprocessed as in training."""
        self.weight.copy_(whitening_filters(images, self.kernel_size[0]))


def whitening_filters(images: Tensor, side: int, eps: float = 5e-4) -> Tensor:
    """Return filters that whiten the patches of `images`, most varied direction first, then their negatives.

    Their shape is (2 * channels * side**2, channels, side, side), in float64 on the CPU, for patches of
    `side` x `side` pixels. The patches' mean is not subtracted, as in the sources. `eps` is added to every
    eigenvalue, to limit the filters of directions in which the data hardly varies.

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
