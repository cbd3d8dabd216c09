"""The residual networks for small images: 3 stages of basic blocks, 20 to 110 layers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ptfast.core.errors import ConfigError
from ptfast.core.sections.section import Count, Fraction
from ptfast.models.layers import drop_path, rate_of_block


class ResNetCifar(nn.Module):
    """ResNet-20, 32, 44, 56 or 110 with parameter-free shortcuts (option A of the paper).

    Three stages of `(depth - 2) / 6` basic blocks at full, half and quarter resolution. ResNet-20 has 0.27 M
    parameters and reaches 91.25 % on CIFAR-10 in the paper. It takes images of any size, even 8x8 digits.

    Args:
        num_classes: outputs, filled from the data.
        in_channels: channels of an image, filled from the data.
        depth: layers with weights, 6n + 2.
        width: channels of the first stage; doubled in each of the next two.
        drop_path: probability that a sample skips the last block in training, see `models.layers`.

    Source: He, Zhang, Ren, Sun 2015, arXiv:1512.03385, section 4.2.
    """

    def __init__(
        self,
        num_classes: Count,
        in_channels: Count = 3,
        depth: Count = 20,
        width: Count = 16,
        drop_path: Fraction = 0.0,
    ) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            nearest = max(8, 6 * round((depth - 2) / 6) + 2)
            what, hint = "the depth must be 6n + 2", f"The nearest is {nearest}"
            raise ConfigError("C005", what, key="model.depth", value=depth, suggestion=hint)
        blocks_per_stage = (depth - 2) // 6
        self.conv = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        blocks: list[nn.Module] = []
        channels = width
        for stage in range(3):
            for index in range(blocks_per_stage):
                out_channels = width * 2**stage
                rate = rate_of_block(len(blocks), 3 * blocks_per_stage, drop_path)
                stride = 2 if stage and index == 0 else 1
                blocks.append(BasicBlock(channels, out_channels, stride, rate))
                channels = out_channels
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, in_channels, height, width) to logits (batch, num_classes)."""
        x = F.relu(self.norm(self.conv(images)), inplace=True)
        x = self.blocks(x)
        return self.head(x.mean((2, 3)))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, and a shortcut that subsamples and pads with zero channels as needed."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, drop_path: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.stride, self.drop_path = stride, drop_path
        self.new_channels = out_channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)), inplace=True)
        out = self.norm2(self.conv2(out))
        if self.drop_path and self.training:
            out = drop_path(out, self.drop_path)
        if self.stride != 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.new_channels:
            before = self.new_channels // 2
            x = F.pad(x, (0, 0, 0, 0, before, self.new_channels - before))
        return F.relu(out + x, inplace=True)
