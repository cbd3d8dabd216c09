"""A multilayer perceptron over flattened inputs, with embeddings for the categories of a table."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ptfast.core.errors import ConfigError
from ptfast.core.sections.section import Count, Fraction

_EXACT_IN_BFLOAT16 = 256


class Mlp(nn.Module):
    """Linear layers with ReLU between them; images are flattened first.

    Args:
        input_shape: shape of one input without the batch, filled from the data.
        num_classes: outputs, filled from the data.
        hidden: width of each hidden layer; an empty list gives a linear model.
        batch_norm: add BatchNorm between each hidden layer and its ReLU.
        dropout: probability of zeroing a hidden activation, in [0, 1).
        categories: sizes of a table's categorical columns, filled from the data. The last entries of an
            input are category indices, each of which is embedded.
        target_scale: mean and standard deviation of the targets, filled from the data. Outputs are in the
            targets' unit, while the layers learn standardized values.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: Count,
        hidden: Sequence[Count] = (256, 128),
        batch_norm: bool = False,
        dropout: Fraction = 0.0,
        categories: Sequence[int] | None = None,
        target_scale: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        width = math.prod(input_shape)
        self.target_scale = target_scale
        self.num_categorical = len(categories or ())
        self.largest = max(categories or [0])
        if categories:
            # The width that fastai uses by default.
            widths = [min(600, round(1.6 * size**0.56)) for size in categories]
            self.embeddings = nn.ModuleList(map(nn.Embedding, categories, widths))
            for weight in self.embeddings.parameters():
                # Categories that training has not seen have no effect.
                nn.init.zeros_(weight.data[0])
            width += sum(widths) - len(widths)
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
        if self.num_categorical:
            inputs = self._embedded(inputs)
        outputs = self.layers(inputs)
        if self.target_scale is None:
            return outputs
        mean, std = self.target_scale
        return outputs.float() * std + mean

    def _embedded(self, inputs: Tensor) -> Tensor:
        if self.largest > _EXACT_IN_BFLOAT16 and inputs.dtype in (torch.bfloat16, torch.float16):
            what = f"16-bit inputs cannot represent the numbers of {self.largest:,} categories"
            hint = "Use precision=amp, which keeps inputs in float32"
            raise ConfigError("C011", what, key="precision", suggestion=hint)
        numbers, codes = inputs[:, : -self.num_categorical], inputs[:, -self.num_categorical :].long()
        columns = codes.unbind(1)
        return torch.cat([numbers, *(e(c) for e, c in zip(self.embeddings, columns, strict=True))], 1)
