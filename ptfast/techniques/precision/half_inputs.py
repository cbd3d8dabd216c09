"""Which models convert their inputs to the half type of a run before anything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ptfast.core.tensors.torch_internals import DispatchMode
from ptfast.core.tensors.trees import tree_leaves
from ptfast.techniques.rewrites.model_rewrites import undisturbed


class _InputUses(DispatchMode):
    """Notes whether `inputs` or views of them are cast to `dtype`, and whether anything else is done."""

    def __init__(self, inputs: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype, self._memory = dtype, inputs.untyped_storage().data_ptr()
        self.cast = self.other = False

    def _is_input(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage().data_ptr() == self._memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, cast = kwargs or {}, torch.ops.aten._to_copy.default
        result = func(*args, **kwargs)
        if any(map(self._is_input, tree_leaves((args, kwargs)))):
            if func is cast and kwargs.get("dtype") == self._dtype:
                self.cast = True
            elif func._schema.is_mutable or not all(map(self._is_input, tree_leaves(result))):
                self.other = True
        return result


def casts_inputs(model: nn.Module, inputs: Tensor, dtype: torch.dtype, forward: Callable[[], object]) -> bool:
    """Return True if `forward`, which calls `model`, does nothing with `inputs` but cast them to `dtype`.

    Such a model gives the same bits for inputs that are of `dtype` already, which saves a pass over them.

    Cost: a forward pass.
    """
    uses = _InputUses(inputs, dtype)
    with undisturbed(model), uses:
        forward()
    return uses.cast and not uses.other
