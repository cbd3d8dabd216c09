"""A first convolution whose filters come from the data: they decorrelate the pixels of small patches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_AT_ONCE = 256
"""Images whose patches are in memory together."""


class Whitening(nn.Conv2d):
    """A convolution whose outputs are uncorrelated and of one size on the data, each with its negative.

    Neighbouring pixels are nearly alike, and a first layer spends its first epochs on learning to tell them
    apart. Here it begins with the answer: filters are the eigenvectors of the covariance of patches, over the
    root of their eigenvalues. They are never trained, which saves their gradients; a bias is.

    Weights are random until `init_from_data` has seen inputs.

    Args:
        in_channels: channels of an image.
        side: of a patch, in pixels. Outputs are as large as the images for 3, a row and a column smaller
            for 2.

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

    Args:
        images: (batch, channels, height, width).
        side: of a patch, in pixels.
        eps: added to every eigenvalue, for directions in which the data hardly varies.

    Returns:
        (2 * channels * side**2, channels, side, side), on the CPU, in float64, in which it is computed. The
        mean of a patch counts as variation, as in the sources.

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
