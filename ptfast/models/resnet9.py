"""A shallow residual network for small images, designed for short training times."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ptfast.core.sections.section import Count


class ResNet9(nn.Module):
    """Eight convolutions and a linear layer, with two residual pairs, for images of 8x8 pixels and up.

    It is wide and shallow: fewer, larger operations than in a ResNet-20 keep an accelerator busy. At width
    64 it has 6.6 M parameters; the source reports 94 % on CIFAR-10 in 24 epochs.

    Args:
        num_classes: outputs, filled from the data.
        in_channels: channels of an image, filled from the data.
        width: channels of the first layer; doubled three times.
        logit_scale: factor on the logits, which slows the growth of the last layer at high learning rates.

    Source: David Page 2018, "How to Train Your ResNet"; the winning entry of DAWNBench.
    """

    def __init__(
        self,
        num_classes: Count,
        in_channels: Count = 3,
        width: Count = 64,
        logit_scale: float = 0.125,
    ) -> None:
        super().__init__()
        self.stem = conv(in_channels, width)
        self.stage1 = nn.Sequential(conv(width, 2 * width), nn.MaxPool2d(2))
        self.residual1 = nn.Sequential(conv(2 * width, 2 * width), conv(2 * width, 2 * width))
        self.stage2 = nn.Sequential(conv(2 * width, 4 * width), nn.MaxPool2d(2))
        self.stage3 = nn.Sequential(conv(4 * width, 8 * width), nn.MaxPool2d(2))
        self.residual3 = nn.Sequential(conv(8 * width, 8 * width), conv(8 * width, 8 * width))
        self.head = nn.Linear(8 * width, num_classes, bias=False)
        self.logit_scale = logit_scale

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, in_channels, height, width) to logits (batch, num_classes)."""
        x = self.stage1(self.stem(images))
        x = x + self.residual1(x)
        x = self.stage3(self.stage2(x))
        x = x + self.residual3(x)
        return self.head(F.max_pool2d(x, x.shape[2:]).flatten(1)) * self.logit_scale


def conv(in_channels: int, out_channels: int) -> nn.Sequential:
    """Return a 3x3 convolution with BatchNorm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )
