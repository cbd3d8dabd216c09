"""Gradients that are filled with zeros before each step, as torch did before it set them to None."""

from __future__ import annotations

from torch import Tensor

from ptfast.models.resnet_cifar import ResNetCifar


class ZeroedResNet(ResNetCifar):
    """A ResNet that keeps a gradient for each parameter, filled with zeros, which backward passes add to.

    What `zero_grad(set_to_none=False)` costs: a write of all gradients, and a read as they are added to.
    """

    def __init__(self, num_classes: int, in_channels: int = 3, depth: int = 20, width: int = 16) -> None:
        super().__init__(num_classes, in_channels, depth, width)
        self._kept: dict[str, Tensor] = {}

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, in_channels, height, width) to logits (batch, num_classes)."""
        if self.training:
            for name, parameter in self.named_parameters():
                if name not in self._kept:
                    self._kept[name] = parameter.detach().clone()
                parameter.grad = self._kept[name].zero_()
        return super().forward(images)
