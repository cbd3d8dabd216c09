"""A model sharded over the ranks: each keeps a part of every weight, its gradient and its state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ptfast.core.distributed import Ranks, broadcast_buffers
from ptfast.core.errors import ConfigError, import_extra, name_some
from ptfast.core.tensors.dtensors import own_values
from ptfast.core.tensors.torch_internals import BatchNorm


class Sharded:
    """FSDP2: weights are gathered block by block for forward and backward, then released.

    A rank holds a share of weights, gradients and optimizer state, and one or two whole blocks at a time, so
    that models train that fit no single device. Ranks send half as much again as with DDP.

    Under autocast blocks are gathered in its half type, except in models with BatchNorm, whose kernels need
    weights and statistics of one type. Shares, gradients and the optimizer's step stay in float32.

    Args:
        model: the plain model, on the CPU, with parameters of one type (else C011); changed in place. They
            become DTensors of the same names, so the optimizer has to be built afterwards.
        device: where the shares go. A block is whole there only until it is cut.
        blocks: parts of the model, none inside another. The rest of it is one more block.
        half_type: that of autocast; None for float32.
        prefetch: blocks that are gathered beside the one that computes; 1 is torch's own order.
        float8: weights of linear layers are `apply_float8`'s, and gathered as its numbers.

    Cost: two seconds to import, once. Source: Zhao et al. 2023, "PyTorch FSDP", arXiv:2304.11277;
    Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054.
    """

    sharded = True

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        device: torch.device,
        *,
        blocks: Iterable[nn.Module],
        half_type: torch.dtype | None,
        prefetch: int = 1,
        float8: bool = False,
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.distributed.tensor import DTensor
        from torch.utils import swap_tensors

        types = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
        if len(types) > 1:
            what = f"the weights are {' and '.join(types)}, and fsdp gathers those of a block as one"
            hint = "Use precision=bf16, which gathers float32 weights as bf16, or parallel=ddp"
            raise ConfigError("C011", what, key="parallel", value="fsdp", suggestion=hint)
        if any(isinstance(module, BatchNorm) for module in model.modules()):
            half_type = None
        sums = torch.float32 if half_type is not None else None
        policy = MixedPrecisionPolicy(param_dtype=half_type, reduce_dtype=sums)
        mesh = init_device_mesh(device.type, (ranks.num_ranks,))
        blocks = list(blocks)
        for block in (*blocks, model):
            whole = [
                each for each in (*block.parameters(), *block.buffers()) if not isinstance(each, DTensor)
            ]
            for each in whole:
                if own_values(each) is each:
                    each.data = each.data.to(device)
                else:
                    # `data` would leave the values inside of it where they are.
                    swap_tensors(each, nn.Parameter(each.detach().to(device), each.requires_grad))
            # As in DDP: ranks may differ in weights that the model drew from another source.
            broadcast_buffers([own_values(each).detach() for each in whole], ranks)
            # An evaluation has no backward pass to release what forward gathered.
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        if prefetch > 1:
            _prefetch([model, *blocks], prefetch, "set_modules_to_forward_prefetch")
            _prefetch([model, *reversed(blocks)], prefetch, "set_modules_to_backward_prefetch")
        if float8:
            # Before each forward pass, since weights change in steps, by averages and by what is loaded.
            scale = import_extra("torchao.float8", "float8", "parallel.float8_gather", "true")
            compute = scale.precompute_float8_dynamic_scale_for_fsdp
            model.register_forward_pre_hook(lambda module, inputs: compute(module), prepend=True)
        self.module: Any = model
        self.float8 = float8
        self.train, self.eval = model.train, model.eval

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """The model's output."""
        return self.module(*inputs, **keywords)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let a backward pass add to this rank's own gradients; a later one averages them."""
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    def check_gradients(self) -> None:
        """Refuse, with C011, parameters without a gradient: ranks that differ would add up different ones."""
        named = self.module.named_parameters()
        unused = [name for name, p in named if p.requires_grad and p.grad is None]
        if unused:
            what = f"the loss does not depend on {name_some(unused)}, which fsdp does not support"
            hint = "Freeze or remove them, or use parallel=ddp parallel.unused_parameters=true"
            raise ConfigError("C011", what, key="parallel", value="fsdp", suggestion=hint)


def _prefetch(parts: list[Any], number: int, setting: str) -> None:
    """Let each of `parts`, in the order in which they compute, gather the `number` that follow it."""
    for index, part in enumerate(parts, 1):
        getattr(part, setting)(parts[index : index + number])
