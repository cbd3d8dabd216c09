"""A shallow residual network for small images, made for short training times."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptfast.core.errors import ConfigError
from ptfast.core.sections.section import Count


class ResNet9(nn.Module):
    """Eight convolutions and a linear layer, with two residual pairs, for images of 8x8 pixels and up.

    Wide and shallow: fewer, larger operations than a ResNet-20, so that an accelerator is kept busy. At width
    64 it has 6.6 M parameters; the source reports 94 % on CIFAR-10 in 24 epochs.

    Args:
        num_classes: outputs, filled from the data.
        in_channels: channels of an image, filled from the data.
        width: channels of the first layer; doubled three times.
        logit_scale: factor of the logits, which slows the growth of the last layer at high learning rates.
        whitening: side in pixels, 2 or 3, of the patches by which a fixed first layer is computed from the
            data; see `Whitening`. 0 for a first layer that is learned.

    Source: David Page 2018, "How to Train Your ResNet"; the winning entry of DAWNBench.
    """

    def __init__(
        self,
        num_classes: Count,
        in_channels: Count = 3,
        width: Count = 64,
        logit_scale: float = 0.125,
        whitening: int = 0,
    ) -> None:
        super().__init__()
        if whitening not in (0, 2, 3):
            raise ConfigError("C005", "must be 0, 2 or 3", key="model.whitening", value=whitening)
        self.stem, stem_width = conv(in_channels, width), width
        if whitening:
            whiten = Whitening(in_channels, whitening)
            self.stem, stem_width = nn.Sequential(whiten, nn.ReLU()), whiten.out_channels
        self.stage1 = nn.Sequential(conv(stem_width, 2 * width), nn.MaxPool2d(2))
        self.residual1 = nn.Sequential(conv(2 * width, 2 * width), conv(2 * width, 2 * width))
        self.stage2 = nn.Sequential(conv(2 * width, 4 * width), nn.MaxPool2d(2))
        self.stage3 = nn.Sequential(conv(4 * width, 8 * width), nn.MaxPool2d(2))
        self.residual3 = nn.Sequential(conv(8 * width, 8 * width), conv(8 * width, 8 * width))
        self.head = nn.Linear(8 * width, num_classes, bias=False)
        self.logit_scale = logit_scale

    def init_from_data(self, images: Tensor) -> None:
        """Compute the whitening layer, where there is one, from `images` as they are trained on."""
        first = self.stem[0]
        if isinstance(first, Whitening):
            first.init_from_data(images)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, in_channels, height, width) to logits (batch, num_classes)."""
        x = self.stage1(self.stem(images))
        x = x + self.residual1(x)
        x = self.stage3(self.stage2(x))
        x = x + self.residual3(x)
        return self.head(F.max_pool2d(x, x.shape[2:]).flatten(1)) * self.logit_scale


def conv(in_channels: int, out_channels: int) -> nn.Sequential:
    """A 3x3 convolution with batch norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


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
