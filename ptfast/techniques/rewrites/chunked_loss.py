"""The last layer of a language model and its loss, computed together for some tokens at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ptfast.core.errors import ConfigError
from ptfast.core.protocols import LinearLogits


class ChunkedHead(nn.Linear):
    """A linear layer that leaves its product to the loss in training; in evaluation it computes it."""

    def forward(self, input: Tensor) -> Any:
        if not self.training:
            return super().forward(input)
        hidden, weight, device = input, self.weight, input.device.type
        if torch.is_autocast_enabled(device):
            # Torch casts the inputs of a linear layer, and not those of the loss.
            half = torch.get_autocast_dtype(device)
            hidden, weight = hidden.to(half), weight.to(half)
        return LinearLogits(hidden, weight)


def apply_chunked_head(model: nn.Module, task: Any) -> None:
    """Have the last layer of `model` and the loss of `task` computed chunk by chunk in training, in place.

    Logits of all tokens are the largest activation of a language model with a large vocabulary; they, their
    softmax and their gradient are never there at once. Names and shapes of weights do not change.

    Args:
        model: whose output is that of its layer `head`.

    Raises:
        ConfigError: C011 where there is no such layer, or the loss takes logits alone.

    Source: torch.nn.functional.linear_cross_entropy; Wijmans et al. 2024, arXiv:2411.09009.
    """
    what, head = None, getattr(model, "head", None)
    if not getattr(task, "takes_linear_logits", False):
        what = f"{type(task).__name__} needs the logits of all tokens at once"
    elif type(head) is not nn.Linear or head.bias is not None:
        what = f"{type(model).__name__} has no last layer `head` that is an nn.Linear without a bias"
    if what is not None:
        hint = "Set rewrites.chunked_loss=false"
        raise ConfigError("C011", what, key="rewrites.chunked_loss", value="true", suggestion=hint)
    assert head is not None
    head.__class__ = ChunkedHead
