"""A multilayer perceptron over flattened inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from ptfast.core.sections.section import Count, Fraction


class Mlp(nn.Module):
    """Linear layers with ReLU between them; images are flattened first.

    Args:
        input_shape: shape of one input without the batch, filled from the data.
        num_classes: outputs, filled from the data.
        hidden: width of each hidden layer; an empty list gives a linear model.
        batch_norm: BatchNorm between each hidden layer and its ReLU.
        dropout: probability of zeroing a hidden activation, in [0, 1).
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: Count,
        hidden: Sequence[Count] = (256, 128),
        batch_norm: bool = False,
        dropout: Fraction = 0.0,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        width = math.prod(input_shape)
        for next_width in hidden:
            layers.append(nn.Linear(width, next_width))
            if batch_norm:
                layers.append(nn.BatchNorm1d(next_width))
            layers.append(nn.ReLU())
            if dropout:
                layers.append(nn.Dropout(dropout))
            width = next_width
        layers.append(nn.Linear(width, num_classes))
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, *input_shape) to logits (batch, num_classes)."""
        return self.layers(inputs)
