"""Evaluation in batches of one size: a smaller one is filled up with stand-ins that do not count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ptfast.core.errors import ConfigError
from ptfast.core.tensors.trees import tree_leaves, tree_map

_KEY: dict[str, Any] = {"key": "eval.last", "value": "pad", "suggestion": "Set eval.last=keep"}


class FullSize(nn.Module):
    """A model that sees every batch at one size, and whose outputs are those of the batch as it was.

    A split's last batch is smaller than the others: another shape, for which cuDNN searches its kernels anew
    and memory is laid out anew. Here its first sample stands in for those that it lacks, and what the model
    says of the stand-ins is left out before a loss or a metric sees it.

    Args:
        model: whose inputs and outputs are tensors, samples first, or tuples and dicts of such.
        batch_size: samples that it always sees.

    Cost: that of a full batch, once in an evaluation.
    """

    def __init__(self, model: nn.Module, batch_size: int) -> None:
        super().__init__()
        self.model, self.training, self._batch_size = model, model.training, batch_size

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """The model's outputs for the samples that there are.

        Raises:
            ConfigError: C011 for an output that is not one for each sample.
        """
        tensors = (leaf for leaf in tree_leaves((args, keywords)) if isinstance(leaf, Tensor))
        first = next(tensors)
        size = len(first)
        if size >= self._batch_size:
            return self.model(*args, **keywords)
        places = torch.arange(self._batch_size, device=first.device)
        places = places.where(places < size, 0)

        def filled(value: Any) -> Any:
            # This way of indexing keeps the memory format.
            return value[places] if _is_of(size, value) else value

        def narrowed(value: Any) -> Any:
            if isinstance(value, Tensor) and not _is_of(self._batch_size, value):
                what = f"the padding cannot be cut from an output of shape {list(value.shape)}"
                raise ConfigError("C011", what, **_KEY)
            return value[:size] if isinstance(value, Tensor) else value

        args, keywords = tree_map(filled, (args, keywords))
        return tree_map(narrowed, self.model(*args, **keywords))


def check_full_size(last: str, task: Any) -> None:
    """Refuse stand-ins where the model itself sums up the loss of a batch.

    Raises:
        ConfigError: C011.
    """
    if last == "pad" and type(task).__name__ == "OwnLoss":
        raise ConfigError("C011", "a model that returns its own loss would count the padding", **_KEY)


def _is_of(size: int, value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == size
