"""A model sharded over the ranks: each rank keeps a part of every weight, its gradient and its state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ptfast.core.distributed import Ranks, broadcast_buffers
from ptfast.core.errors import ConfigError, name_some
from ptfast.core.tensors.torch_internals import BatchNorm


class Sharded:
    """FSDP2: weights are gathered block by block for forward and backward, then released.

    Each rank stores a part of the weights, gradients and optimizer state, plus one or two whole blocks at a
    time, so a model need not fit on one device. Ranks send 1.5 times as many bytes as with DDP.

    Under autocast, blocks are gathered in its half-precision type, except in models with BatchNorm, whose
    kernels need weights and statistics of one type. Shards, gradients and the optimizer step stay in float32.

    Args:
        model: the plain model, on the CPU, with parameters of one type (else C011); changed in place. They
            become DTensors of the same names, so the optimizer must be built afterwards.
        device: device of the shards. A block is whole there only until it is sharded.
        blocks: parts of the model, not nested. The rest of the model is one more block.
        autocast_dtype: the type of autocast; None for float32.

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
        autocast_dtype: torch.dtype | None,
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.distributed.tensor import DTensor

        types = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
        if len(types) > 1:
            what = f"the weights are {' and '.join(types)}, but fsdp gathers those of a block together"
            hint = "Use precision=bf16, which gathers float32 weights as bf16, or parallel=ddp"
            raise ConfigError("C011", what, key="parallel", value="fsdp", suggestion=hint)
        if any(isinstance(module, BatchNorm) for module in model.modules()):
            autocast_dtype = None
        sums = torch.float32 if autocast_dtype is not None else None
        policy = MixedPrecisionPolicy(param_dtype=autocast_dtype, reduce_dtype=sums)
        mesh = init_device_mesh(device.type, (ranks.world_size,))
        for block in (*blocks, model):
            whole = [
                each for each in (*block.parameters(), *block.buffers()) if not isinstance(each, DTensor)
            ]
            for each in whole:
                each.data = each.data.to(device)
            # As in DDP: ranks may differ in weights that the model drew from another source.
            broadcast_buffers([each.detach() for each in whole], ranks)
            # An evaluation has no backward pass to release the gathered weights.
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        self.module: Any = model
        self.train, self.eval = model.train, model.eval

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Return the model's output."""
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
        """Raise C011 for parameters without a gradient: ranks would sum different ones."""
        named = self.module.named_parameters()
        unused = [name for name, p in named if p.requires_grad and p.grad is None]
        if unused:
            what = f"the loss does not depend on {name_some(unused)}, which fsdp does not support"
            hint = "Freeze or remove them, or use parallel=ddp parallel.unused_parameters=true"
            raise ConfigError("C011", what, key="parallel", value="fsdp", suggestion=hint)
